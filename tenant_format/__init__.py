"""The file in which a tenant goes from one stack to another; see docs/tenants.md."""

from tenant_format.digest import array_digest, digest
from tenant_format.file import TenantFileError, matching, read, training_settings, write

__all__ = [
    "TenantFileError",
    "array_digest",
    "digest",
    "matching",
    "read",
    "training_settings",
    "write",
]
