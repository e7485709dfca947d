"""Run clients in other processes of this machine, reached by bytes alone."""
