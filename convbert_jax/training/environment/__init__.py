"""Runtime environment of a run: devices, signals, compilation cache, watchdog."""
