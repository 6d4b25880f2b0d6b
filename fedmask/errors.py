"""Errors that say, in one line, what was given, what is wrong and what to do."""


class FedmaskError(ValueError):
    """Base of every error that fedmask raises on purpose; the command line prints it as one line."""


class BlockError(FedmaskError):
    """A tensor is unknown, missing or mis-shaped for the reference model's blocks."""


class NonFiniteUpdateError(FedmaskError):
    """A client's update holds NaN or infinity.

    Attributes:
        client: id of the client that sent it.
        block: name of the first block in which it was found.
    """

    def __init__(self, client: int, block: str, detail: str = "NaN or infinity") -> None:
        super().__init__(
            f"client {client} sent {detail} in block {block!r}; the model is unchanged. "
            'Leave the client out, or skip it and reweight the rest: on_nonfinite="skip", --on-nonfinite skip'
        )
        self.client = client
        self.block = block


class DataError(FedmaskError):
    """A data set is missing, unreadable, or not in the layout that was promised."""


class RunDirectoryError(FedmaskError):
    """A run directory belongs to another configuration, or is damaged."""
