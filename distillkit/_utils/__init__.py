"""Internal helpers: argument checks, files, progress bars, threads and conversion of inputs."""
