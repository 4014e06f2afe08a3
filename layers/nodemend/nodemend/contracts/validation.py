"""What AppConfig sends to a Lambda validator."""

import base64

import yaml
from pydantic import BaseModel, ConfigDict, Field

from nodemend.domain.errors import PolicyInvalidError


class ValidatePolicyRequest(BaseModel):
    """The configuration version that is about to be deployed."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    content: str = Field(description="The document, base64.")
    version: str = Field(default="", alias="configurationVersion")

    def document(self) -> object:
        """Return what the YAML text holds.

        Raises:
            PolicyInvalidError: if it is no YAML.
        """
        try:
            return yaml.safe_load(base64.b64decode(self.content, validate=True))
        # ValueError: no base64, no UTF-8, or a date such as 2026-13-45.
        except (ValueError, yaml.YAMLError) as error:
            raise PolicyInvalidError(f"the policy is no YAML document: {error}") from error
