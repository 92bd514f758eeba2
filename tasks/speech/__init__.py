"""Speech recognition and pretraining."""
