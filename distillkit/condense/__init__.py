"""distillkit.condense."""
