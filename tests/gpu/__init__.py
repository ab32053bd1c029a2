"""What needs a GPU, or is made for one."""
