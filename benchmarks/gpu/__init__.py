"""What needs a GPU to be measured."""
