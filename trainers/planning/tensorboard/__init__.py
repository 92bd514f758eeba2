"""What a run writes for TensorBoard, and the plugin that shows it there."""
