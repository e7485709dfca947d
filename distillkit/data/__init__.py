"""distillkit.data."""
