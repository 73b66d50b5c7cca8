"""The sentence about ranks that make different calls."""


def describe_disagreement(where: str, what: str) -> str:
    """Return one sentence on ranks that make different calls: where in their order, what they are, and the fix."""
    return (
        f"ranks disagree {where}: {what}; "
        "every rank must call the same collectives in the same order with the same sizes and types"
    )
