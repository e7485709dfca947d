"""distillkit.privacy."""
