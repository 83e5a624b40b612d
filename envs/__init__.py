"""The world: workflow core, drivers, traces, the AEC face, the registry, tasks, tools and the teams."""
