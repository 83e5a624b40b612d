"""Old names of modules that have moved: they import or run what they became, with a warning, until 0.3.

A module that became a folder of the same name is not here: its folder offers what others used of it.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # typing's own takes 5 ms to import, and this file is a part of every `import unitymas`
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

MOVED = {
    "agents.attention": "agents.model.attention",
    "agents.cache": "agents.engines.torch.kv_cache",
    "agents.engine": "agents.engines.torch.torch_engine",
    "agents.engines.drawn": "agents.engines.drawn_versions",
    "agents.engines.graphs": "agents.engines.torch.cuda_graphs",
    "agents.engines.kv_cache": "agents.engines.torch.kv_cache",
    "agents.engines.makers": "agents.engines.built_in",
    "agents.engines.memory": "agents.engines.torch.memory",
    "agents.engines.pieces": "agents.engines.token_text",
    "agents.engines.prefill": "agents.engines.torch.prefill",
    "agents.engines.torch.graphs": "agents.engines.torch.cuda_graphs",
    "agents.engines.torch.napping": "agents.engines.torch.sleeping",
    "agents.engines.torch_engine": "agents.engines.torch.torch_engine",
    "agents.engines.vllm_engine": "agents.engines.vllm.vllm_engine",
    "agents.engines.vllm_setup": "agents.engines.vllm.vllm_setup",
    "agents.engines.whole_engine": "agents.engines.torch.whole_engine",
    "agents.failures": "agents.basics.failures",
    "agents.frozen": "agents.basics.frozen",
    "agents.hints": "agents.basics.hints",
    "agents.llama": "agents.model.llama",
    "agents.logprobs": "agents.model.logprobs",
    "agents.machine": "agents.basics.machine",
    "agents.manifest": "agents.basics.manifest",
    "agents.model.trial": "agents.model.packing_trial",
    "agents.named_parts": "agents.basics.named_parts",
    "agents.outage": "agents.basics.failures",
    "agents.pieces": "agents.engines.token_text",
    "agents.prompts": "agents.engines.torch.prefill",
    "agents.sampling": "agents.engines.sampling",
    "agents.shape": "agents.model.shape",
    "agents.stopping": "agents.engines.stopping",
    "agents.text.plain": "agents.text.control_tokens",
    "agents.text.reading": "agents.text.reply_readers",
    "agents.text.spoken": "agents.text.attributed_text",
    "agents.text.wording": "agents.text.role_prompt",
    "agents.threads": "agents.basics.threads",
    "agents.vllm": "agents.engines.vllm.vllm_engine",
    "agents.weights": "agents.model.weights",
    "benchmarks.charts": "benchmarks.pages.charts",
    "benchmarks.console": "benchmarks.evaluation.terminal",
    "benchmarks.entries": "benchmarks.leaderboard.entries",
    "benchmarks.evalcli": "cli.evaluation",
    "benchmarks.evaluate": "benchmarks.evaluation.evaluate",
    "benchmarks.evaluation.tables": "benchmarks.evaluation.result_tables",
    "benchmarks.export": "benchmarks.evaluation.export",
    "benchmarks.faults.lives": "benchmarks.faults.forked_runs",
    "benchmarks.identity": "benchmarks.evaluation.identity",
    "benchmarks.leaderboard.reenact": "benchmarks.leaderboard.replay_episodes",
    "benchmarks.leaderboard.remake": "benchmarks.leaderboard.claimed_environment",
    "benchmarks.page": "benchmarks.pages.html",
    "benchmarks.pages.boards": "benchmarks.pages.game_drawings",
    "benchmarks.pages.environments": "benchmarks.pages.environment_pages",
    "benchmarks.papers.grid": "benchmarks.papers.reproduction",
    "benchmarks.reenact": "benchmarks.leaderboard.replay_episodes",
    "benchmarks.report": "benchmarks.pages.report",
    "benchmarks.schema": "benchmarks.leaderboard.json_schema",
    "benchmarks.sources": "benchmarks.pages.trace_sources",
    "benchmarks.speed.gpu.shapes": "benchmarks.speed.gpu.model_sizes",
    "benchmarks.stats": "benchmarks.evaluation.stats",
    "benchmarks.store": "benchmarks.evaluation.episode_files",
    "benchmarks.submission": "benchmarks.leaderboard.submission",
    "benchmarks.suites": "benchmarks.evaluation.suites",
    "benchmarks.tables": "benchmarks.evaluation.result_tables",
    "benchmarks.viewer": "benchmarks.pages.viewer",
    "cli.completion": "cli.shell_completion",
    "cli.table": "cli.verbs",
    "envs.adapters": "envs.faces.bridges",
    "envs.arena": "envs.core.arena",
    "envs.branch": "envs.core.branch",
    "envs.check": "envs.conformance",
    "envs.commands": "cli.environments",
    "envs.data.adapters": "envs.data.qa_adapters",
    "envs.data.catalogue": "envs.data.published",
    "envs.data.commands": "cli.data",
    "envs.data.schemas": "envs.data.row_schemas",
    "envs.data.store": "envs.data.local",
    "envs.drivers": "envs.core.drivers",
    "envs.env": "envs.faces.aec",
    "envs.execution": "envs.core.execution",
    "envs.ledger": "envs.core.ledger",
    "envs.render": "envs.faces.render",
    "envs.rounds": "envs.core.rounds",
    "envs.spaces": "envs.faces.spaces",
    "envs.tasks": "envs.core.tasks",
    "envs.toolloop": "envs.tool_loop",
    "envs.tools.base": "envs.tools.tool",
    "envs.tools.code_checkers": "envs.tools.code.checkers",
    "envs.tools.code_tests": "envs.tools.code.cases",
    "envs.tools.math_pool": "envs.tools.math.processes",
    "envs.tools.math_worker": "envs.tools.math.worker",
    "envs.tools.numerals": "envs.tools.math.numerals",
    "envs.tools.retrieval.base": "envs.tools.retrieval.retriever",
    "envs.tools.retrieval.bm25": "envs.tools.retrieval.index.bm25",
    "envs.tools.retrieval.build": "envs.tools.retrieval.index.build",
    "envs.tools.retrieval.cache": "envs.tools.retrieval.serving.memo",
    "envs.tools.retrieval.connections": "envs.tools.retrieval.serving.connection_limits",
    "envs.tools.retrieval.corpus": "envs.tools.retrieval.index.corpus",
    "envs.tools.retrieval.dense": "envs.tools.retrieval.index.dense",
    "envs.tools.retrieval.embedders": "envs.tools.retrieval.index.embedders",
    "envs.tools.retrieval.endpoint": "envs.tools.retrieval.serving.endpoint",
    "envs.tools.retrieval.index_files": "envs.tools.retrieval.index.index_files",
    "envs.tools.retrieval.memo": "envs.tools.retrieval.serving.memo",
    "envs.tools.retrieval.pool": "envs.tools.retrieval.serving.pool",
    "envs.tools.retrieval.postings": "envs.tools.retrieval.index.postings",
    "envs.tools.retrieval.server": "envs.tools.retrieval.serving.server",
    "envs.tools.retrieval.serving.connections": "envs.tools.retrieval.serving.connection_limits",
    "envs.tools.retrieval.store": "envs.tools.retrieval.index.index_files",
    "envs.tools.retrieval.terms": "envs.tools.retrieval.index.terms",
    "envs.tools.retrieval.text": "envs.tools.retrieval.index.terms",
    "envs.tools.sandbox_kernel": "envs.tools.sandbox.kernel",
    "envs.tools.sandbox_launch": "envs.tools.sandbox.launch",
    "envs.tools.sandbox_program": "envs.tools.sandbox.program",
    "envs.tools.sandbox_room": "envs.tools.sandbox.room",
    "envs.tools.sandbox_seccomp": "envs.tools.sandbox.seccomp",
    "envs.tools.schemas": "envs.tools.signatures",
    "envs.trace": "envs.core.trace",
    "envs.workflow": "envs.core.workflow",
    "envs.workflows.games.world": "envs.workflows.games.simulator",
    "hints": "agents.basics.hints",
    "trainers.algorithms.base": "trainers.algorithms.algorithm",
    "trainers.batch": "trainers.group.learning.batch",
    "trainers.checkpoint": "trainers.controller.checkpoint",
    "trainers.collect": "trainers.controller.collect",
    "trainers.commands": "cli.training",
    "trainers.console": "trainers.controller.reporting.console",
    "trainers.controller.console": "trainers.controller.reporting.console",
    "trainers.controller.hosts": "trainers.controller.all_groups",
    "trainers.controller.loggers": "trainers.controller.reporting.loggers",
    "trainers.controller.overlap.record": "trainers.controller.overlap.draw_record",
    "trainers.controller.progress": "trainers.controller.reporting.progress",
    "trainers.controller.replaying": "trainers.controller.replayed_run",
    "trainers.controller.watchdog": "trainers.controller.reporting.watchdog",
    "trainers.counterfactual": "trainers.controller.counterfactual",
    "trainers.credit": "trainers.controller.statistics.credit",
    "trainers.decisions": "trainers.controller.statistics.decisions",
    "trainers.gae": "trainers.controller.statistics.gae",
    "trainers.group.batch": "trainers.group.learning.batch",
    "trainers.group.dealing": "trainers.group.learning.dealing",
    "trainers.group.losses": "trainers.group.learning.losses",
    "trainers.group.optimizers.blocks": "trainers.group.optimizers.moments_8bit",
    "trainers.group.optimizers.chance": "trainers.group.optimizers.stochastic_rounding",
    "trainers.group.packing": "trainers.group.learning.packing",
    "trainers.group.parameters": "trainers.group.learning.parameters",
    "trainers.group.ranks.actors": "trainers.group.ranks.rank_actors",
    "trainers.group.ranks.sharding": "trainers.group.ranks.fsdp",
    "trainers.group.ranks.shards": "trainers.group.ranks.sharded_checkpoint",
    "trainers.group.targets": "trainers.group.learning.targets",
    "trainers.group.turns": "trainers.group.shared_device",
    "trainers.group.update": "trainers.group.learning.update",
    "trainers.groups": "trainers.controller.statistics.comparison",
    "trainers.hosting": "trainers.group.hosting",
    "trainers.launch.command": "trainers.launch.launch_command",
    "trainers.loggers": "trainers.controller.reporting.loggers",
    "trainers.losses": "trainers.group.learning.losses",
    "trainers.options": "trainers.config.choices",
    "trainers.packing": "trainers.group.learning.packing",
    "trainers.parameters": "trainers.group.learning.parameters",
    "trainers.presets": "trainers.config.presets",
    "trainers.resolve": "trainers.config.resolve",
    "trainers.run": "trainers.controller.run",
    "trainers.runtime": "trainers.group.runtime",
    "trainers.samples": "trainers.group.sample_store",
    "trainers.settings": "trainers.config.group_settings",
    "trainers.step": "trainers.controller.step",
    "trainers.table": "trainers.controller.statistics.table",
    "trainers.targets": "trainers.group.learning.targets",
    "trainers.tiny_drills": "trainers.tiny.drills",
    "trainers.tiny_school": "trainers.tiny.school",
    "trainers.tiny_tokenizer": "trainers.tiny.tokenizer",
    "trainers.tree": "trainers.controller.tree",
    "trainers.update": "trainers.group.learning.update",
}


class Moved:
    """Finds a module under its old name; the module is the very one that lives under its new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __package__ or name not in MOVED:
            return None
        import importlib.util

        return importlib.util.spec_from_loader(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_new_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it has been executed under its new name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m` runs: the module under its new name, as the main module."""
        text = f"import runpy; runpy.run_module({_new_name(fullname)!r}, run_name='__main__', alter_sys=True)"
        return compile(text, fullname, "exec")


def _new_name(old: str) -> str:
    """Return the new name of a module, and warn that the old one is outdated."""
    import warnings

    new = f"{__package__}.{MOVED[old.partition('.')[2]]}"
    warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=3)
    return new


sys.meta_path.append(Moved())  # asked last: only for what is not found otherwise
