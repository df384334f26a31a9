"""What a verdict is worth: a leaf that needs the standard library only.

    reward = rewards.get("default")
    score = reward(verdict)          # score.total, score.terms, score.unscored

Not here: how a verdict comes about (`pkb_env`), what is done with a score (`training`).
"""

from rewards.advantage import ADVANTAGES
from rewards.compose import KINDS, Composed, Part, from_toml
from rewards.presets import PRESETS, get
from rewards.returns import discounted
from rewards.score import History, Reward, Score, Scorer, Term
from rewards.verdict import Finding, RankReport, Status, Verdict

__all__ = [
    "ADVANTAGES",
    "KINDS",
    "PRESETS",
    "Composed",
    "Finding",
    "History",
    "Part",
    "RankReport",
    "Reward",
    "Score",
    "Scorer",
    "Status",
    "Term",
    "Verdict",
    "discounted",
    "from_toml",
    "get",
]
