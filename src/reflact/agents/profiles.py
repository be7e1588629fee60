"""Command-line agents by name: how each is started, asks the gateway and finds its instructions.

Each profile was tried with the version that it names.
"""

from __future__ import annotations

from collections.abc import Mapping

from reflact.types import FrozenModel


class AgentProfile(FrozenModel):
    """How a command-line agent is run as it is; it reads the task from standard input.

    Attributes:
        skill_file: Where it reads instructions that are always in force.
        skills_folder: Where it looks for skills, each in a folder of its own.
        answer_file: The file with its answer; None for standard output.
        side_call: A text in the first message of requests that are no part of the task.
        tried: The version that this profile was tried with.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str]
    skill_file: str
    skills_folder: str
    answer_file: str | None = None
    side_call: str | None = None
    tried: str


# The profiles that ``CommandTarget(profile=...)`` takes.
PROFILES: Mapping[str, AgentProfile] = {
    "codex": AgentProfile(
        command=(
            *("codex", "exec", "--ephemeral", "--skip-git-repo-check"),
            '--config=sandbox_mode="workspace-write"',
            '--config=web_search="disabled"',
            '--config=model_provider="reflact"',
            '--config=model_providers.reflact={name="reflact",base_url="{base_url}",'
            'env_key="OPENAI_API_KEY",wire_api="responses"}',
            *("--output-last-message=LAST.txt", "--model={model}"),
        ),
        variables={"OPENAI_API_KEY": "{token}"},
        skill_file="AGENTS.md",
        skills_folder=".agents/skills",
        answer_file="LAST.txt",
        tried="0.169.0",
    ),
    "opencode": AgentProfile(
        command=("opencode", "run"),
        variables={
            "OPENAI_API_KEY": "{token}",
            "OPENCODE_CONFIG_CONTENT": '{"model": "reflact/{model}", '
            '"small_model": "reflact/{model}", "share": "disabled", "autoupdate": false, '
            '"permission": "allow", "provider": {"reflact": '
            '{"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{base_url}", "apiKey": '
            '"{env:OPENAI_API_KEY}"}, "models": {"{model}": {}}}}}',
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        skill_file="AGENTS.md",
        skills_folder=".opencode/skills",
        side_call="You are a title generator.",
        tried="1.18.33",
    ),
    "claude-code": AgentProfile(
        command=(
            *(
                "claude",
                "--print",
                "--setting-sources=project",
                "--strict-mcp-config",
                "--no-session-persistence",
            ),
            *("--permission-mode=acceptEdits", "--allowedTools=Bash,Read,Edit,Write,Glob,Grep"),
            *("--disallowedTools=WebSearch,WebFetch", "--model={model}"),
        ),
        variables={
            "ANTHROPIC_BASE_URL": "{root_url}",
            "ANTHROPIC_API_KEY": "{token}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        skill_file="CLAUDE.md",
        skills_folder=".claude/skills",
        tried="2.1.197",
    ),
}
