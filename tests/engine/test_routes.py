from weightsync_engine.routes import MAX_LEASE_SECONDS, Lease


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_is_held_renewed_and_expires() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert lease.take("a", 10)
    assert not lease.take("b", 10)
    assert lease.state() == {"owner": "a", "expires_in": 10.0}
    clock.now += 9
    assert lease.renew("a", 10)
    clock.now += 9
    assert not lease.take("b", 10)
    clock.now += 2
    assert lease.state()["owner"] == ""
    assert lease.take("b", 10)
    assert not lease.take("a", 10)


def test_a_late_renewal_is_granted_only_while_nobody_else_had_it() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert lease.take("a", 10)
    clock.now += 60
    assert lease.renew("a", 10)
    clock.now += 60
    assert lease.take("b", 10)
    lease.give_back("b")
    assert not lease.renew("a", 10)


def test_only_the_owner_gives_it_back_and_nobody_holds_it_for_ever() -> None:
    clock = Clock()
    lease = Lease(clock)
    assert lease.take("a", 1e9)
    assert lease.state()["expires_in"] == MAX_LEASE_SECONDS
    lease.give_back("b")
    assert not lease.take("b", 1)
    lease.give_back("a")
    assert lease.take("b", 1)
