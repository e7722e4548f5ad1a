"""Models from the Hugging Face hub, through its own client and its own cache."""

from __future__ import annotations

from pathlib import Path

import grpc

from everystop.errors import Reason, ServiceError, invalid

# Weights, configuration, chat template, and the files of both kinds of tokenizers.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt"]
# The same weights again in the vendor's own layout, and exports for other runtimes in subfolders.
_UNWANTED = ["consolidated*", "*/*"]


def download_from_hub(repo: str, revision: str | None) -> Path:
    """The local snapshot of `repo` at `revision` (a branch, tag or commit; the main branch when None).

    What the hub's cache already holds is used when the hub can't be reached. Raises ServiceError: INVALID_ARGUMENT when
    the hub does not have it or does not give it, UNAVAILABLE when it can't be reached.
    """
    # Imported here: half a second that only hub models need.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:  # before RepositoryNotFoundError, of which it is a kind
        raise invalid("model", f"{repo} is gated: accept its terms on the hub, then set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise invalid("model", f"the hub has no {repo}, or it is private (set HF_TOKEN)") from error
    except RevisionNotFoundError as error:
        raise invalid("model", f"{repo} has no revision {revision!r}") from error
    except (HfHubHTTPError, OSError) as error:
        # OSError: also what the client raises when it is offline and its cache does not have the model.
        message = f"{repo} is not in the hub's cache and can't be fetched: {str(error).strip().splitlines()[0]}"
        raise ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.INTERNAL, message) from error
