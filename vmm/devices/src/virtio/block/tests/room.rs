//! A host without room.

use super::*;

#[test]
fn a_request_that_finds_no_room_waits_for_it_and_others_go_on() {
    let disk = Fake::new();
    let (mut driver, _) = patient(disk.clone(), PATIENCE);
    let (data, room) = (driver.buffer(&[9; 512]), driver.room(512));
    for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
        *disk.fails.lock().unwrap() = Some(("write", kind));
        let open: Vec<u16> = (0..20).map(|sector| add(&mut driver, WRITE, sector, &[data]).0).collect();
        driver.kick(0);
        driver.host.wait_full(true);
        assert_eq!(driver.wait_for(0, MOMENT), None, "nothing is answered");
        assert_eq!(ask(&mut driver, READ, 30, &[room]), OK);
        assert_eq!(ask(&mut driver, FLUSH, 0, &[]), OK);
        *disk.fails.lock().unwrap() = None;
        let mut done: Vec<u16> = open.iter().map(|_| driver.wait(0).head).collect();
        done.sort_unstable();
        let mut open = open;
        open.sort_unstable();
        assert_eq!(done, open);
        driver.host.wait_full(false);
        assert!(disk.data.lock().unwrap()[..20 * 512].iter().all(|byte| *byte == 9));
    }
    let told = driver.host.told().full;
    assert_eq!(told.iter().map(|(_, full)| *full).collect::<Vec<_>>(), [true, false, true, false]);
    assert_eq!(told[0].0, "block vda");
}

#[test]
fn a_request_that_finds_no_room_in_time_is_an_io_error_and_nothing_of_it_is_forgotten() {
    let disk = Fake::new();
    let (mut driver, _) = patient(disk.clone(), Duration::ZERO);
    let data = driver.buffer(&[9; 512]);
    *disk.fails.lock().unwrap() = Some(("write", io::ErrorKind::StorageFull));
    assert_eq!(ask(&mut driver, WRITE, 0, &[data]), IO_ERROR);
    driver.host.wait_full(true);
    *disk.fails.lock().unwrap() = None;
    assert_eq!(ask(&mut driver, WRITE, 0, &[data]), OK);
    driver.host.wait_full(false);
}

#[test]
fn what_waits_for_room_is_left_alone_by_a_pause_and_answered_before_a_reset_or_the_end() {
    let disk = Fake::new();
    let (mut driver, _) = patient(disk.clone(), PATIENCE);
    let data = driver.buffer(&[9; 512]);
    *disk.fails.lock().unwrap() = Some(("write", io::ErrorKind::StorageFull));
    let (_, status) = add(&mut driver, WRITE, 0, &[data]);
    driver.kick(0);
    driver.host.wait_full(true);
    driver.transport.pause(true);
    // At most one try had begun before.
    let tries = disk.calls().len();
    std::thread::sleep(Duration::from_millis(1200));
    assert_eq!(disk.calls().len(), tries, "a paused device tries nothing");
    driver.transport.pause(false);
    disk.wait_for_calls(tries + 1);
    crate::bus::BusDevice::write(&*driver.transport, register::STATUS, &[0; 4]);
    assert_eq!(driver.content(status), [IO_ERROR], "nobody is left to try it");
    driver.host.wait_full(false);
    driver.bring_up(u64::MAX);
    *disk.fails.lock().unwrap() = Some(("write", io::ErrorKind::StorageFull));
    let data = driver.buffer(&[9; 512]);
    let (_, status) = add(&mut driver, WRITE, 0, &[data]);
    driver.kick(0);
    driver.host.wait_full(true);
    // One last try finds room.
    *disk.fails.lock().unwrap() = None;
    driver.transport.close().unwrap();
    assert_eq!(driver.content(status), [OK]);
    assert_eq!(disk.data.lock().unwrap()[0], 9);
}

#[test]
fn there_is_no_room_as_long_as_one_request_is_tried_again_whatever_else_succeeds() {
    let disk = Fake::new();
    let (mut driver, _) = patient(disk.clone(), PATIENCE);
    let (data, range) = (driver.buffer(&[9; 512]), driver.buffer(&[0; 16]));
    *disk.fails.lock().unwrap() = Some(("write", io::ErrorKind::StorageFull));
    add(&mut driver, WRITE, 0, &[data]);
    driver.kick(0);
    driver.host.wait_full(true);
    let tries = disk.calls().len();
    disk.hold(Some("write"));
    disk.wait_for_calls(tries + 1);
    // The write is neither waiting nor answered now, and this changes the disk.
    assert_eq!(ask(&mut driver, DISCARD, 0, &[range]), OK);
    disk.hold(None);
    disk.wait_for_calls(disk.calls().len() + 1);
    *disk.fails.lock().unwrap() = None;
    driver.wait(0);
    driver.host.wait_full(false);
    let told: Vec<bool> = driver.host.told().full.iter().map(|(_, full)| *full).collect();
    assert_eq!(told, [true, false]);
}
