"""`python -m distillkit`, the same as the command `distillkit`."""

from distillkit.commands import main

if __name__ == "__main__":
    main()
