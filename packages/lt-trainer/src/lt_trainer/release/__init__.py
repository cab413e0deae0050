"""Open release of a run: make, verify and reproduce it."""

from typing import TYPE_CHECKING

from lt_trainer.lazy import lazy_exports

if TYPE_CHECKING:
    from lt_trainer.release.errors import ReleaseError as ReleaseError
    from lt_trainer.release.facts import Facts as Facts
    from lt_trainer.release.facts import read_facts as read_facts
    from lt_trainer.release.make import MakeOptions as MakeOptions
    from lt_trainer.release.make import make_release as make_release
    from lt_trainer.release.reproduce import ReproduceOptions as ReproduceOptions
    from lt_trainer.release.reproduce import Reproduction as Reproduction
    from lt_trainer.release.reproduce import reproduce_release as reproduce_release
    from lt_trainer.release.verify import Verification as Verification
    from lt_trainer.release.verify import verify_release as verify_release
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "errors": "ReleaseError",
            "facts": "Facts read_facts",
            "make": "MakeOptions make_release",
            "reproduce": "ReproduceOptions Reproduction reproduce_release",
            "verify": "Verification verify_release",
        },
    )
