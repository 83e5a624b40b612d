"""Speed of episodes, tools and the controller: core, collector, trees, star, routing, statistics, retrieval, sandbox."""
