"""Reports of a run: console, logs, progress, timeline, and the watchdog that names what waits for what."""
