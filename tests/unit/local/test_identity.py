import threading

from local.identity import Credential, Identities


def test_each_issued_key_is_its_own_and_names_its_caller():
    identities = Identities()
    drain, verify = identities.issue("drain_node"), identities.issue("verify_fault")
    assert drain.access_key_id != verify.access_key_id
    assert identities.caller_of(drain.access_key_id) == "drain_node"
    assert identities.lookup(verify.access_key_id) == verify


def test_a_key_nobody_holds_is_unknown():
    identities = Identities()
    assert identities.lookup("ASIANOBODY") is None
    assert identities.caller_of("ASIANOBODY") == "unknown"


def test_temporary_keys_carry_a_session_token_and_long_lived_ones_do_not():
    identities = Identities()
    temporary, permanent = identities.issue("a"), identities.issue("b", temporary=False)
    assert temporary.access_key_id.startswith("ASIA")
    assert temporary.environment()["AWS_SESSION_TOKEN"] == temporary.session_token
    assert permanent.access_key_id.startswith("AKIA")
    assert "AWS_SESSION_TOKEN" not in permanent.environment()


def test_a_credential_from_an_assumed_role_can_be_registered_and_revoked():
    identities = Identities()
    assumed = Credential("ASIAROLE", "secret", "token", "cordon_node")
    identities.register(assumed)
    assert identities.caller_of("ASIAROLE") == "cordon_node"
    identities.revoke("ASIAROLE")
    assert identities.lookup("ASIAROLE") is None


def test_secrets_are_not_in_the_repr():
    credential = Identities().issue("a")
    assert credential.secret_access_key not in repr(credential)
    assert str(credential.session_token) not in repr(credential)


def test_keys_issued_from_many_threads_are_all_kept():
    identities = Identities()
    issued: list[Credential] = []

    def issue() -> None:
        issued.extend(identities.issue("worker") for _ in range(200))

    threads = [threading.Thread(target=issue) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({credential.access_key_id for credential in issued}) == 800
    assert all(identities.lookup(c.access_key_id) is c for c in issued)
