use torpor_vmm_api::ThreadKind;

use super::*;
use crate::testing::{Buffer, Driver, HIGH_START, LOW_MEMORY, MOMENT, RawDescriptor, flag};

fn device(rate: Option<RateLimit>) -> Driver {
    Driver::start(Box::new(Rng::new(rate).unwrap()))
}

#[test]
fn a_request_is_filled_over_all_its_buffers_and_no_two_are_alike() {
    let mut driver = device(None);
    let rooms = [driver.room(64), driver.room(1), driver.room(4096)];
    assert_eq!(driver.request(0, &rooms), 64 + 1 + 4096);
    let first = driver.content(rooms[2]);
    assert_eq!(driver.request(0, &rooms), 64 + 1 + 4096);
    assert_ne!(first, driver.content(rooms[2]));
    assert_ne!(first, vec![0xee; 4096]);
    assert_eq!(driver.host.told().threads, [ThreadKind::Small]);
}

#[test]
fn a_huge_request_gets_a_bounded_answer_and_an_empty_one_an_empty_one() {
    let mut driver = device(None);
    let huge = Buffer { address: 1 << 20, length: 8 << 20, writable: true };
    assert_eq!(u64::from(driver.request(0, &[huge])), MAX_REQUEST);
    let readable = driver.buffer(b"what the device doesn't read");
    assert_eq!(driver.request(0, &[readable]), 0);
}

#[test]
fn a_guest_beyond_its_rate_waits_and_a_reset_does_not_wait_for_it() {
    let rate = RateLimit { bytes_per_second: 1, burst_bytes: 100, ..RateLimit::default() };
    let mut driver = device(Some(rate));
    let room = driver.room(100);
    // The burst, and one request on credit.
    assert_eq!(driver.request(0, &[room]), 100);
    assert_eq!(driver.request(0, &[room]), 100);
    driver.add(0, &[room]);
    driver.kick(0);
    assert_eq!(driver.wait_for(0, MOMENT), None);
    driver.reset();
    driver.bring_up(u64::MAX);
    let room = driver.room(50);
    assert_eq!(driver.request(0, &[room]), 50, "a new life has a new bucket");
}

#[test]
fn a_paused_device_takes_nothing_until_it_goes_on() {
    let mut driver = device(None);
    driver.transport.pause(true);
    let room = driver.room(16);
    driver.add(0, &[room]);
    driver.kick(0);
    assert_eq!(driver.wait_for(0, MOMENT), None);
    driver.transport.pause(false);
    assert_eq!(driver.wait(0).length, 16);
}

#[test]
fn a_hostile_ring_breaks_the_device_and_nothing_else() {
    type Attack = fn(&mut Driver);
    let attacks: [Attack; 5] = [
        |driver| {
            let (address, next) = (0x10_0000, 0);
            driver.set_descriptor(
                0,
                0,
                RawDescriptor { address, length: 16, flags: flag::NEXT | flag::WRITE, next },
            );
            driver.publish(0, 0);
        },
        |driver| {
            let address = LOW_MEMORY - 8;
            driver.set_descriptor(0, 0, RawDescriptor { address, length: 16, flags: flag::WRITE, next: 0 });
            driver.publish(0, 0);
        },
        |driver| {
            let (address, length) = (HIGH_START - 8, u32::MAX);
            driver.set_descriptor(0, 0, RawDescriptor { address, length, flags: flag::WRITE, next: 0 });
            driver.publish(0, 0);
        },
        |driver| driver.publish(0, 999),
        |driver| driver.set_available_index(0, 5000),
    ];
    for attack in attacks {
        let mut driver = device(None);
        attack(&mut driver);
        driver.kick_anyway(0);
        assert!(!driver.host.wait_broken().is_empty());
        (0..1000).for_each(|_| driver.kick_anyway(0));
        driver.bring_up(u64::MAX);
        let room = driver.room(16);
        assert_eq!(driver.request(0, &[room]), 16, "a reset heals it");
    }
}

#[test]
fn kicks_before_it_is_ready_and_floods_of_them_do_nothing() {
    let mut driver = Driver::new(Box::new(Rng::new(None).unwrap()));
    (0..1000).for_each(|queue| driver.kick_anyway(queue % 3));
    driver.bring_up(u64::MAX);
    (0..100_000).for_each(|_| driver.kick_anyway(0));
    let room = driver.room(16);
    assert_eq!(driver.request(0, &[room]), 16);
    assert_eq!(driver.host.told().broken, []);
}
