"""AWS on one machine: moto behind a front of our own, a Lambda runtime, the template's stack."""
