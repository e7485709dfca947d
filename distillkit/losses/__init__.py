"""distillkit.losses."""
