"""What each model of a pool answered to the same prompts, and what the answers are worth."""

from app.dataset.answers import Answer, read_answers
from app.dataset.prompts import Prompt, read_prompts
from app.dataset.scores import Score, read_scores

__all__ = ["Answer", "Prompt", "Score", "read_answers", "read_prompts", "read_scores"]
