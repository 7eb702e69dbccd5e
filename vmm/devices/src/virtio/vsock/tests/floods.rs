//! More than there is room for.

use super::*;

#[test]
fn a_guest_that_asks_for_resets_and_takes_none_costs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let device = device(&folder, 8);
    let mut guest = Guest::with(device, folder, 0, ROOM);
    for port in 0..2000 {
        let to = Header { source_port: port, target_port: 9, ..Header::default() };
        guest.reply(&to, operation::DATA, 0, b"x");
    }
    // Now it has rooms: it gets as many as were kept, not more.
    for _ in 0..100 {
        let room = guest.driver.room(ROOM);
        guest.give_room(room);
    }
    guest.driver.kick(engine::RECEIVE);
    let mut resets = 0;
    while let Some(used) = guest.driver.wait_for(engine::RECEIVE, 3 * MOMENT) {
        assert_eq!(guest.taken(used).0.operation, operation::RESET);
        resets += 1;
    }
    assert!((1..=256).contains(&resets), "{resets}");
    guest.connected(5);
}

#[test]
fn half_of_the_room_stays_the_host_s() {
    let mut guest = Guest::new(8);
    let listener = UnixListener::bind(guest.folder.path().join("vsock_9")).unwrap();
    let mut answers = Vec::new();
    for port in 0..20 {
        let to = Header { source_port: 9, target_port: port, ..Header::default() };
        guest.reply(&to, operation::REQUEST, 0, &[]);
        answers.push(guest.receive().0.operation);
    }
    assert_eq!(answers.iter().filter(|answer| **answer == operation::RESPONSE).count(), 4);
    let (_client, _) = guest.connected(5);
    drop(listener);
}

#[test]
fn clients_that_never_say_anything_or_never_get_an_answer_stay_within_the_limit() {
    let mut guest = Guest::new(4);
    let silent: Vec<_> = (0..50).map(|_| guest.client("")).collect();
    assert!(guest.silent());
    drop(silent);
    let unanswered: Vec<_> = (0..30).map(|port| guest.client(&format!("AWAIT {}\n", 10 + port))).collect();
    for _ in 0..4 {
        guest.receive_some(operation::REQUEST);
    }
    assert!(guest.silent());
    drop(unanswered);
    // Those that had waited for a place may still get one before it is seen that they have gone.
    for _ in 0..30 {
        let Some(used) = guest.driver.wait_for(engine::RECEIVE, MOMENT) else { break };
        guest.taken(used);
    }
    guest.connected(5);
}

#[test]
fn kicks_before_it_is_ready_and_floods_of_them_do_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let device = device(&folder, 8);
    let driver = Driver::new(Box::new(device));
    (0..1000).for_each(|queue| driver.kick_anyway(queue % 5));
    drop(driver);
    let mut guest = Guest::new(8);
    for _ in 0..100_000 {
        guest.driver.kick_anyway(engine::SEND as u32);
    }
    guest.connected(5);
}
