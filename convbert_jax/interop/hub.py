"""Upload of an exported folder to the Hugging Face hub."""

import re
from pathlib import Path

from absl import logging

from convbert_jax import storage
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.weight_files import first_line

_FLAG = "--push_to_hub"


def check(repository: str) -> None:
    """Checks the name of a repository and that there is a token, before a long export.

    Raises:
      ConversionError: the name is not OWNER/NAME, or no token is stored.
    """
    import huggingface_hub

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ConversionError(
            f"{_FLAG}={repository} is not the name of a repository; use OWNER/NAME.",
            field=_FLAG,
            value=repository,
        )
    if not huggingface_hub.get_token():
        raise ConversionError(
            f"{_FLAG}={repository} needs a token with write access. Set HF_TOKEN or run "
            "hf auth login.",
            field=_FLAG,
            value=repository,
        )


def push(folder: Path, repository: str) -> None:
    """Uploads a folder as one commit; files that only the repository has are kept.

    A repository that does not exist is created as a private one.

    Raises:
      ConversionError: the folder is in a bucket, or the hub refuses the upload or is not reachable.
    """
    import huggingface_hub

    if storage.is_remote(folder):
        raise ConversionError(
            f"Cannot upload {folder} to the hub from a bucket. Use a local --output.",
            field=_FLAG,
            value=repository,
        )
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        found = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export of convbert_jax"
        )
    except Exception as error:  # of the HTTP library, which differs between versions of the client
        raise ConversionError(
            f"Cannot upload {folder} to {repository}: {first_line(error)}. The folder is complete; "
            f"repeat the upload with: hf upload {repository} {folder}",
            field=_FLAG,
            value=repository,
            path=folder,
        ) from error
    logging.info("Uploaded %s to %s.", folder, found.commit_url)
