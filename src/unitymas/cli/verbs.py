"""Commands by name: where each of them lives, and what it does in one line."""

from __future__ import annotations

COMMANDS = {
    "list": ("cli.environments:list_main", "list the environments"),
    "info": (
        "cli.environments:info_main",
        "show an environment: roles, formats, rewards, data, a sample observation",
    ),
    "models": (
        "cli.models:models_main",
        "list the models that have names: size, licence, whether they are here",
    ),
    "play": ("cli.environments:play_main", "play an episode, yourself or with a team"),
    "validate": ("cli.environments:validate_main", "check environments: the expert scores 1, the fool 0"),
    "train": ("cli.pages:train_main", "train a team, and write the run's report"),
    "warmstart": ("trainers.warmstart:warmstart_main", "fine-tune a model on the expert's traces"),
    "eval": ("cli.evaluation:eval_main", "evaluate a team on an environment or a suite"),
    "submit": (
        "benchmarks.leaderboard.submission:submit_main",
        "pack an evaluation for a leaderboard, or check one",
    ),
    "leaderboard": (
        "benchmarks.leaderboard.board:leaderboard_main",
        "build a leaderboard's static site, or play entries again",
    ),
    "view": ("cli.pages:view_main", "look at episodes in a browser; a run in progress is live"),
    "report": (
        "benchmarks.pages.report:report_main",
        "write a training run as one page: curves, alarms, episodes",
    ),
    "export": (
        "benchmarks.evaluation.export:export_main",
        "convert traces to a dataset, Parquet, JSON lines or Perfetto",
    ),
    "launch": (
        "trainers.launch.launch_command:launch_main",
        "start a Ray cluster by Slurm, Kubernetes or ssh, and train on it",
    ),
    "data": ("cli.data:data_main", "list, prepare, check and index data sets"),
    "serve": ("envs.tools.retrieval:serve_main", "serve a search index over HTTP"),
    "bench": ("benchmarks.speed:bench_main", "measure the speed of a part"),
}
