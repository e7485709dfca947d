"""distillkit.generate."""
