"""What is known of devices, and of the links between them."""
