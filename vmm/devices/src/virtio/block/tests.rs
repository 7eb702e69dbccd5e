mod room;

use std::io::{IoSlice, IoSliceMut};
use std::process::Command;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use proptest::prelude::*;
use torpor_overlay::{BaseIdentity, create, open, open_read_only, sha256_file};

use super::*;
use crate::testing::{Buffer, Driver, HIGH_START, LOW_MEMORY, MOMENT, PATIENCE, RawDescriptor, flag};
use crate::virtio::mmio::{feature, register, status};

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const IDENTIFY: u32 = 8;
const DISCARD: u32 = 11;
const ZEROES: u32 = 13;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
const SIZE: usize = 1 << 20;

/// A disk in memory that remembers what was asked and can be made to wait or fail.
#[derive(Default)]
struct Fake {
    data: Mutex<Vec<u8>>,
    calls: Mutex<Vec<String>>,
    /// What fails, by the call's first word, and how.
    fails: Mutex<Option<(&'static str, io::ErrorKind)>>,
    /// Calls that begin with this word wait here.
    held: Mutex<Option<&'static str>>,
    released: Condvar,
}

impl Fake {
    fn new() -> Arc<Self> {
        Arc::new(Self { data: Mutex::new((0..SIZE).map(|at| (at / 512) as u8).collect()), ..Self::default() })
    }

    fn call(&self, call: String) -> io::Result<()> {
        let word = call.split(' ').next().unwrap().to_owned();
        self.calls.lock().unwrap().push(call);
        let held = self.held.lock().unwrap();
        drop(self.released.wait_while(held, |held| held.is_some_and(|held| held == word)).unwrap());
        match *self.fails.lock().unwrap() {
            Some((fails, kind)) if fails == word => Err(kind.into()),
            _ => Ok(()),
        }
    }

    fn hold(&self, word: Option<&'static str>) {
        *self.held.lock().unwrap() = word;
        self.released.notify_all();
    }

    fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    fn wait_for_calls(&self, count: usize) {
        for _ in 0..2000 {
            if self.calls().len() >= count {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("{count} calls didn't come: {:?}", self.calls());
    }
}

impl Block for Fake {
    fn size(&self) -> u64 {
        SIZE as u64
    }

    fn readv(&self, buffers: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<()> {
        self.call(format!("read {offset}"))?;
        let data = self.data.lock().unwrap();
        let mut at = offset as usize;
        for buffer in buffers {
            let end = at + buffer.len();
            buffer.copy_from_slice(&data[at..end]);
            at = end;
        }
        Ok(())
    }

    fn writev(&self, buffers: &[IoSlice<'_>], offset: u64) -> io::Result<()> {
        self.call(format!("write {offset}"))?;
        let mut data = self.data.lock().unwrap();
        let mut at = offset as usize;
        for buffer in buffers {
            data[at..at + buffer.len()].copy_from_slice(buffer);
            at += buffer.len();
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.call("flush".into())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.call(format!("discard {offset} {length}"))
    }

    fn write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.call(format!("zero {offset} {length}"))
    }

    fn close(&self) -> io::Result<()> {
        self.call("close".into())
    }
}

fn device(disk: Arc<dyn Block>, read_only: bool) -> Box<BlockDevice> {
    Box::new(BlockDevice::new(BlockOptions {
        name: "vda".into(),
        disk,
        serial: "a serial number that is too long".into(),
        read_only,
        rate: None,
        discard_unit: 65536,
        patience: Duration::from_secs(60),
    }))
}

/// A device whose requests wait so long for room, and its handle.
fn patient(disk: Arc<Fake>, patience: Duration) -> (Driver, BlockHandle) {
    let mut device = device(disk, false);
    device.patience = patience;
    let handle = device.handle();
    (Driver::start(device), handle)
}

fn started() -> (Driver, Arc<Fake>) {
    let disk = Fake::new();
    (Driver::start(device(disk.clone(), false)), disk)
}

fn header(driver: &mut Driver, kind: u32, sector: u64) -> Buffer {
    let bytes = [kind.to_le_bytes().as_slice(), &[0; 4], &sector.to_le_bytes()].concat();
    driver.buffer(&bytes)
}

/// Adds a request; its head and where the status will be.
fn add(driver: &mut Driver, kind: u32, sector: u64, data: &[Buffer]) -> (u16, Buffer) {
    let status = driver.room(1);
    let buffers = [&[header(driver, kind, sector)], data, &[status]].concat();
    (driver.add(0, &buffers), status)
}

/// Does one request alone; its status.
fn ask(driver: &mut Driver, kind: u32, sector: u64, data: &[Buffer]) -> u8 {
    let (head, status) = add(driver, kind, sector, data);
    driver.kick(0);
    let used = driver.wait(0);
    let written: u32 = data.iter().filter(|buffer| buffer.writable).map(|buffer| buffer.length).sum();
    assert_eq!((used.head, used.length), (head, written + 1));
    driver.content(status)[0]
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [sector.to_le_bytes().as_slice(), &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

#[test]
fn the_configuration_tells_size_limits_and_topology() {
    let (driver, _) = started();
    assert_eq!(driver.get(register::DEVICE_ID), 2);
    assert_eq!(u64::from_le_bytes(driver.config(0)), SIZE as u64 / 512);
    assert_eq!(u32::from_le_bytes(driver.config(8)), 128 << 10);
    assert_eq!(u32::from_le_bytes(driver.config(12)), 254);
    assert_eq!(driver.offered() & (1 << 1 | 1 << 2), 1 << 1 | 1 << 2, "SIZE_MAX and SEG_MAX");
    assert_eq!((driver.config::<4>(20), driver.config::<2>(24)), (512u32.to_le_bytes(), [3, 0]));
    assert_eq!(
        [36, 40, 44].map(|at| u32::from_le_bytes(driver.config(at))),
        [MAX_RANGE_SECTORS, MAX_RANGES, 128]
    );
    assert_eq!(driver.config::<8>(58), [0; 8], "zeros follow");
    let mut far = [1; 4];
    crate::bus::BusDevice::read(&*driver.transport, u64::MAX, &mut far);
    assert_eq!(far, [0; 4]);
}

#[test]
fn what_is_written_is_read_back_through_buffers_cut_anyhow() {
    let (mut driver, disk) = started();
    let data: Vec<u8> = (0..4096u32).map(|at| (at * 7) as u8).collect();
    let pieces = [driver.buffer(&data[..100]), driver.buffer(&data[100..3333]), driver.buffer(&data[3333..])];
    assert_eq!(ask(&mut driver, WRITE, 5, &pieces), OK);
    let rooms = [driver.room(4095), driver.room(1)];
    assert_eq!(ask(&mut driver, READ, 5, &rooms), OK);
    let read = rooms.map(|room| driver.content(room)).concat();
    assert!(read == data);
    assert_eq!(disk.data.lock().unwrap()[2560..6656], data);
}

#[test]
fn header_and_status_may_be_cut_and_share_descriptors_and_tables_with_data() {
    for indirect in [false, true] {
        let (mut driver, disk) = started();
        let all = [WRITE.to_le_bytes().as_slice(), &[0; 4], &1u64.to_le_bytes(), &[9; 512]].concat();
        let mut buffers =
            vec![driver.buffer(&all[..3]), driver.buffer(&all[3..13]), driver.buffer(&all[13..])];
        let status = driver.room(1);
        buffers.push(Buffer { length: 0, writable: false, ..buffers[0] });
        buffers.push(status);
        let head = if indirect { driver.add_indirect(0, &buffers) } else { driver.add(0, &buffers) };
        driver.kick(0);
        assert_eq!(driver.wait(0).head, head);
        assert_eq!(driver.content(status), [OK]);
        assert!(disk.data.lock().unwrap()[512..1024].iter().all(|byte| *byte == 9));
        // A read whose data and status are one buffer.
        let room = driver.room(513);
        let request = [header(&mut driver, READ, 1), room];
        assert_eq!(driver.request(0, &request), 513);
        assert_eq!(driver.content(room), [[9; 512].as_slice(), &[OK]].concat());
    }
}

#[test]
fn the_serial_number_is_cut_to_its_twenty_bytes() {
    let (mut driver, _) = started();
    let room = driver.room(20);
    assert_eq!(ask(&mut driver, IDENTIFY, 0, &[room]), OK);
    assert_eq!(driver.content(room), b"a serial number that");
    let small = driver.room(5);
    assert_eq!(ask(&mut driver, IDENTIFY, 0, &[small]), OK);
    assert_eq!(driver.content(small), b"a ser");
}

#[test]
fn ranges_are_discarded_and_zeroed_one_by_one() {
    let (mut driver, disk) = started();
    let ranges = driver.buffer(&[range(0, 8, 0), range(16, 4, 0), range(20, 0, 0)].concat());
    assert_eq!(ask(&mut driver, DISCARD, 0, &[ranges]), OK);
    let zeroes = driver.buffer(&range(1, 1, 1));
    assert_eq!(ask(&mut driver, ZEROES, 0, &[zeroes]), OK);
    assert_eq!(disk.calls(), ["discard 0 4096", "discard 8192 2048", "zero 512 512"]);
    let flags = driver.buffer(&range(0, 8, 1));
    assert_eq!(ask(&mut driver, DISCARD, 0, &[flags]), UNSUPPORTED);
    let beyond = driver.buffer(&range(u64::MAX, u32::MAX, 0));
    assert_eq!(ask(&mut driver, DISCARD, 0, &[beyond]), IO_ERROR);
    assert_eq!(disk.calls().len(), 3);
}

#[test]
fn the_hosts_errors_reach_the_guest_and_the_next_request_goes_on() {
    let (mut driver, disk) = started();
    let (data, room) = (driver.buffer(&[1; 512]), driver.room(512));
    let ranges = driver.buffer(&range(0, 8, 0));
    let cases: [(&str, u32, &[Buffer]); 5] = [
        ("write", WRITE, &[data]),
        ("read", READ, &[room]),
        ("flush", FLUSH, &[]),
        ("discard", DISCARD, &[ranges]),
        ("zero", ZEROES, &[ranges]),
    ];
    for (word, kind, buffers) in cases {
        *disk.fails.lock().unwrap() = Some((word, io::ErrorKind::TimedOut));
        assert_eq!(ask(&mut driver, kind, 0, buffers), IO_ERROR, "{word}");
        *disk.fails.lock().unwrap() = Some((word, io::ErrorKind::Unsupported));
        assert_eq!(ask(&mut driver, kind, 0, buffers), UNSUPPORTED, "{word}");
        *disk.fails.lock().unwrap() = None;
        assert_eq!(ask(&mut driver, kind, 0, buffers), OK, "{word}");
    }
    assert_eq!(ask(&mut driver, READ, SIZE as u64 / 512, &[room]), IO_ERROR);
    assert_eq!(ask(&mut driver, 77, 0, &[]), UNSUPPORTED);
}

#[test]
fn a_read_only_disk_says_so_and_refuses_changes() {
    let disk = Fake::new();
    let mut driver = Driver::start(device(disk.clone(), true));
    assert_eq!(driver.offered() & (1 << 5 | 1 << 13 | 1 << 14), 1 << 5);
    let (data, room) = (driver.buffer(&[1; 512]), driver.room(512));
    assert_eq!(ask(&mut driver, WRITE, 0, &[data]), IO_ERROR);
    assert_eq!(ask(&mut driver, READ, 3, &[room]), OK);
    assert_eq!(driver.content(room), [3; 512]);
    assert_eq!(ask(&mut driver, FLUSH, 0, &[]), OK);
    driver.transport.close().unwrap();
    assert_eq!(disk.calls(), ["read 1536", "close"]);
}

#[test]
fn a_driver_that_cannot_flush_gets_its_writes_durable_at_once() {
    let disk = Fake::new();
    let mut driver = Driver::start_with(device(disk.clone(), false), !(1 << VIRTIO_BLK_F_FLUSH));
    let data = driver.buffer(&[1; 512]);
    assert_eq!(ask(&mut driver, WRITE, 0, &[data]), OK);
    let ranges = driver.buffer(&range(0, 8, 0));
    assert_eq!(ask(&mut driver, ZEROES, 0, &[ranges]), OK);
    assert_eq!(disk.calls(), ["write 0", "flush", "zero 0 4096", "flush"]);
}

#[test]
fn a_slow_request_holds_up_none_of_those_that_came_with_it() {
    let (mut driver, disk) = started();
    disk.hold(Some("flush"));
    let (flush, status) = add(&mut driver, FLUSH, 0, &[]);
    let room = driver.room(512);
    let reads: Vec<_> = (0..8).map(|sector| add(&mut driver, READ, sector, &[room]).0).collect();
    driver.kick(0);
    let mut done: Vec<_> = reads.iter().map(|_| driver.wait(0).head).collect();
    done.sort_unstable();
    let mut expected = reads.clone();
    expected.sort_unstable();
    assert_eq!(done, expected);
    assert_eq!(driver.wait_for(0, MOMENT), None, "the flush is not done");
    disk.hold(None);
    assert_eq!(driver.wait(0).head, flush);
    assert_eq!(driver.content(status), [OK]);
}

#[test]
fn however_many_come_at_once_each_comes_back_once_with_its_own_data() {
    let (mut driver, _) = started();
    for round in 0..20u64 {
        let mark = driver.mark();
        let mut open: Vec<_> = (0..80)
            .map(|at| {
                let sector = (round * 80 + at) % 2048;
                let room = driver.room(512);
                (add(&mut driver, READ, sector, &[room]).0, sector, room)
            })
            .collect();
        driver.kick(0);
        while !open.is_empty() {
            let used = driver.wait(0);
            let at = open.iter().position(|(head, ..)| *head == used.head).expect("a head that is not open");
            let (_, sector, room) = open.swap_remove(at);
            assert_eq!(driver.content(room), [sector as u8; 512]);
        }
        driver.release(mark);
    }
    let threads = driver.host.told().threads;
    assert!(threads.len() <= 5 && threads[0] == torpor_vmm_api::ThreadKind::Block, "{threads:?}");
}

#[test]
fn with_event_indexes_an_interrupt_comes_when_the_driver_wants_it_and_not_before() {
    let (mut driver, disk) = started();
    let queue = &driver.queues[0];
    let used_event = queue.available + 4 + 2 * u64::from(queue.size);
    let room = driver.room(512);
    driver.write(used_event, &2u16.to_le_bytes()); // not before the third
    for sector in 0..3 {
        add(&mut driver, READ, sector, &[room]);
        driver.kick(0);
        disk.wait_for_calls(sector as usize + 1);
        let interrupted = driver.wait_interrupt(if sector == 2 { PATIENCE } else { MOMENT });
        assert_eq!(interrupted, sector == 2);
    }
    disk.hold(Some("flush"));
    add(&mut driver, FLUSH, 0, &[]);
    assert!(driver.kick(0));
    disk.wait_for_calls(4);
    add(&mut driver, READ, 0, &[room]);
    assert!(!driver.kick(0), "it looks at the ring again by itself");
    disk.hold(None);
    for _ in 0..5 {
        driver.wait(0);
    }
}

#[test]
fn without_event_indexes_interrupts_and_kicks_follow_the_flags() {
    let disk = Fake::new();
    let mut driver = Driver::start_with(device(disk, false), !feature::EVENT_INDEX);
    let room = driver.room(512);
    assert_eq!(ask(&mut driver, READ, 1, &[room]), OK);
    driver.suppress_interrupts(0, true);
    let _ = driver.wait_interrupt(MOMENT);
    let (head, _) = add(&mut driver, READ, 2, &[room]);
    // Without a kick, when it is still looking at the ring.
    driver.kick(0);
    let used = loop {
        match driver.take_used(0) {
            Some(used) => break used,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    assert_eq!(used.head, head);
    assert!(!driver.wait_interrupt(MOMENT), "it was told not to");
    driver.suppress_interrupts(0, false);
    assert_eq!(ask(&mut driver, READ, 3, &[room]), OK);
}

#[test]
fn a_paused_device_finishes_what_it_has_and_takes_nothing_more() {
    let (mut driver, disk) = started();
    disk.hold(Some("flush"));
    add(&mut driver, FLUSH, 0, &[]);
    driver.kick(0);
    disk.wait_for_calls(1);
    let transport = Arc::clone(&driver.transport);
    let pausing = std::thread::spawn(move || transport.pause(true));
    std::thread::sleep(MOMENT);
    assert!(!pausing.is_finished(), "a request is in flight");
    disk.hold(None);
    pausing.join().unwrap();
    driver.wait(0);
    let room = driver.room(512);
    add(&mut driver, READ, 1, &[room]);
    driver.kick_anyway(0);
    assert_eq!(driver.wait_for(0, MOMENT), None);
    assert_eq!(disk.calls(), ["flush"]);
    driver.transport.pause(false);
    driver.wait(0);
}

#[test]
fn a_reset_waits_for_what_is_in_flight_and_the_device_works_again() {
    let (mut driver, disk) = started();
    disk.hold(Some("write"));
    let data = driver.buffer(&[1; 512]);
    for sector in 0..3 {
        add(&mut driver, WRITE, sector, &[data]);
    }
    driver.kick(0);
    disk.wait_for_calls(3);
    let transport = Arc::clone(&driver.transport);
    let resetting = std::thread::spawn(move || {
        crate::bus::BusDevice::write(&*transport, register::STATUS, &[0; 4]);
    });
    std::thread::sleep(MOMENT);
    assert!(!resetting.is_finished());
    disk.hold(None);
    resetting.join().unwrap();
    driver.bring_up(u64::MAX);
    let room = driver.room(512);
    assert_eq!(ask(&mut driver, READ, 2, &[room]), OK);
    assert_eq!(driver.content(room), [1; 512]);
}

#[test]
fn close_finishes_flushes_and_closes_and_tells_what_failed() {
    let (mut driver, disk) = started();
    let data = driver.buffer(&[1; 512]);
    for sector in 0..5 {
        add(&mut driver, WRITE, sector, &[data]);
    }
    driver.kick(0);
    for _ in 0..5 {
        driver.wait(0);
    }
    *disk.fails.lock().unwrap() = Some(("flush", io::ErrorKind::StorageFull));
    let error = driver.transport.close().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().starts_with("closing vda: "), "{error}");
    assert_eq!(disk.calls()[5..], ["flush", "close"]);
}

#[test]
fn a_disk_of_another_size_is_told_to_the_guest_that_is_there() {
    let (mut driver, handle) = patient(Fake::new(), PATIENCE);
    while driver.wait_interrupt(Duration::ZERO) {}
    let generation = driver.get(register::CONFIG_GENERATION);
    handle.resized();
    assert!(driver.wait_interrupt(PATIENCE));
    assert_ne!(driver.get(register::CONFIG_GENERATION), generation);
    driver.reset();
    handle.resized();
    assert!(!driver.wait_interrupt(MOMENT), "nobody is there");
}

#[test]
fn a_request_larger_than_what_the_guest_was_told_is_refused() {
    let (mut driver, disk) = started();
    let room = Buffer { address: 1 << 20, length: 8 << 20, writable: true };
    for rooms in [vec![room; 4], vec![room; 500]] {
        let status = driver.room(1);
        let buffers = [vec![header(&mut driver, READ, 0)], rooms, vec![status]].concat();
        driver.add_indirect(0, &buffers);
        driver.kick(0);
        driver.wait(0);
        assert_eq!(driver.content(status), [IO_ERROR]);
    }
    assert_eq!(disk.calls(), Vec::<String>::new());
}

#[test]
fn a_limit_delays_requests_and_loses_none() {
    let disk = Fake::new();
    let rate = RateLimit { operations_per_second: 200, burst_operations: 1, ..RateLimit::default() };
    let options = BlockOptions {
        name: "vda".into(),
        disk: disk.clone(),
        serial: String::new(),
        read_only: false,
        rate: Some(rate),
        discard_unit: 4096,
        patience: Duration::from_secs(60),
    };
    let mut driver = Driver::start(Box::new(BlockDevice::new(options)));
    let begin = Instant::now();
    let room = driver.room(512);
    for sector in 0..20 {
        add(&mut driver, READ, sector, &[room]);
    }
    driver.kick(0);
    for _ in 0..20 {
        driver.wait(0);
    }
    // A lower bound only: 18 requests had to wait 5 ms each.
    assert!(begin.elapsed() >= Duration::from_millis(90));
}

/// Breaks a device by what `attack` does to its ring; why it was broken. Then the device must work again after a reset.
fn broken_by(attack: impl FnOnce(&mut Driver)) -> String {
    let (mut driver, _) = started();
    attack(&mut driver);
    driver.kick_anyway(0);
    let reason = driver.host.wait_broken();
    assert_ne!(driver.status() & status::NEEDS_RESET, 0);
    driver.kick_anyway(0);
    driver.bring_up(u64::MAX);
    let room = driver.room(512);
    assert_eq!(ask(&mut driver, READ, 1, &[room]), OK);
    reason
}

#[test]
fn a_chain_that_runs_in_circles_breaks_the_device() {
    let reason = broken_by(|driver| {
        let descriptor = RawDescriptor { address: 0x1000, length: 16, flags: flag::NEXT, next: 1 };
        driver.set_descriptor(0, 0, descriptor);
        driver.set_descriptor(0, 1, RawDescriptor { next: 0, ..descriptor });
        driver.publish(0, 0);
    });
    assert_eq!(reason, "queue 0: a chain has more than 256 descriptors");
}

#[test]
fn wrong_indexes_break_the_device() {
    let reason = broken_by(|driver| driver.set_available_index(0, 257));
    assert_eq!(reason, "queue 0: the available index runs 257 ahead of a ring of 256");
    let reason = broken_by(|driver| driver.publish(0, 256));
    assert_eq!(reason, "queue 0: descriptor 256 is beyond the table of 256");
    let reason = broken_by(|driver| {
        let descriptor = RawDescriptor { address: 0x1000, length: 16, flags: flag::NEXT, next: 0xffff };
        driver.set_descriptor(0, 3, descriptor);
        driver.publish(0, 3);
    });
    assert_eq!(reason, "queue 0: descriptor 65535 is beyond the table of 256");
}

#[test]
fn buffers_outside_memory_break_the_device() {
    let cases =
        [(LOW_MEMORY - 8, 16), (u64::MAX - 8, 16), (HIGH_START - 1, 2), (LOW_MEMORY, 1), (0, u32::MAX)];
    for (address, length) in cases {
        let reason = broken_by(|driver| {
            driver.add(0, &[Buffer { address, length, writable: false }]);
        });
        assert_eq!(
            reason,
            format!("queue 0: a buffer of {length} bytes at {address:#x} is not inside memory")
        );
    }
}

#[test]
fn indirect_tables_that_cannot_be_break_the_device() {
    let table = |driver: &mut Driver, address, length, flags| {
        driver.set_descriptor(
            0,
            0,
            RawDescriptor { address, length, flags: flags | flag::INDIRECT, next: 1 },
        );
        driver.publish(0, 0);
    };
    for length in [0, 15, 17, 16 * 1025] {
        let reason = broken_by(|driver| table(driver, 0x1000, length, 0));
        assert!(reason.contains("no number of descriptors"), "{reason}");
    }
    let reason = broken_by(|driver| table(driver, u64::MAX - 15, 16, 0));
    assert!(reason.contains("not inside memory"), "{reason}");
    let reason = broken_by(|driver| table(driver, 0x1000, 16, flag::NEXT));
    assert!(reason.contains("has a successor"), "{reason}");
    let reason = broken_by(|driver| {
        let inner = RawDescriptor { address: 0x1000, length: 16, flags: flag::INDIRECT, next: 0 };
        let address = driver.buffer(&inner.bytes()).address;
        table(driver, address, 16, 0);
    });
    assert!(reason.contains("named from another table"), "{reason}");
    let reason = broken_by(|driver| {
        let inner = RawDescriptor { address: 0x1000, length: 16, flags: flag::NEXT, next: 0 };
        let address = driver.buffer(&inner.bytes()).address;
        table(driver, address, 16, 0);
    });
    assert_eq!(reason, "queue 0: a chain has more than 1 descriptors");
}

#[test]
fn requests_that_cannot_be_answered_break_the_device() {
    let reason = broken_by(|driver| {
        let header = header(driver, READ, 0);
        driver.add(0, &[header]);
    });
    assert_eq!(reason, "a request has no writable byte for its status");
    let reason = broken_by(|driver| {
        let buffers = [driver.buffer(&[0; 15]), driver.room(1)];
        driver.add(0, &buffers);
    });
    assert_eq!(reason, "a request has a header of 15 bytes instead of 16");
    let reason = broken_by(|driver| {
        let buffers = [driver.room(1), driver.buffer(&[0; 16])];
        driver.add(0, &buffers);
    });
    assert_eq!(reason, "queue 0: a readable buffer follows a writable one");
    let reason = broken_by(|driver| {
        // 256 buffers of 16 MiB are 2^32 bytes.
        let room = Buffer { address: 0, length: 16 << 20, writable: true };
        driver.add_indirect(0, &vec![room; 257]);
    });
    assert_eq!(reason, "queue 0: a chain has more than 2^32 bytes");
}

#[test]
fn a_million_kicks_before_ready_and_after_change_nothing() {
    let disk = Fake::new();
    let mut driver = Driver::new(device(disk.clone(), false));
    for queue in [0, 1, u32::MAX] {
        (0..100_000).for_each(|_| driver.kick_anyway(queue));
    }
    driver.bring_up(u64::MAX);
    (0..700_000).for_each(|_| driver.kick_anyway(0));
    let room = driver.room(512);
    assert_eq!(ask(&mut driver, READ, 1, &[room]), OK);
    assert_eq!(disk.calls(), ["read 512"]);
}

#[test]
fn data_written_through_the_device_is_in_the_overlay_and_the_image_is_sound() {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        assert!(!std::env::var("REQUIRE").is_ok_and(|need| need.contains("tools")), "qemu-img is missing");
        println!(
            "SKIP data_written_through_the_device_is_in_the_overlay_and_the_image_is_sound: qemu-img is missing"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (base, path) = (folder.path().join("base.raw"), folder.path().join("overlay.qcow2"));
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    let identity = BaseIdentity { digest: sha256_file(&base).unwrap(), size: 1 << 20 };
    create(&path, &base, &identity, 4 << 20).unwrap();
    let disk = Arc::new(open(&path, &[&base]).unwrap());
    let mut driver = Driver::start(device(disk, false));
    for round in 0..8u64 {
        let mark = driver.mark();
        for at in 0..16 {
            let data = driver.buffer(&[(round * 16 + at) as u8 + 1; 4096]);
            add(&mut driver, WRITE, (round * 16 + at) * 40, &[data]);
        }
        driver.kick(0);
        for _ in 0..16 {
            driver.wait(0);
        }
        driver.release(mark);
    }
    let zeroes = driver.buffer(&range(0, 8, 1));
    assert_eq!(ask(&mut driver, ZEROES, 0, &[zeroes]), OK);
    assert_eq!(ask(&mut driver, FLUSH, 0, &[]), OK);
    driver.transport.close().unwrap();
    let reopened = open_read_only(&path, &[&base]).unwrap();
    let mut read = vec![0; 4096];
    for at in 0..128u64 {
        reopened.read(&mut read, at * 40 * 512).unwrap();
        let expected = if at == 0 { 0 } else { at as u8 + 1 };
        assert!(read.iter().all(|byte| *byte == expected), "block {at}");
    }
    let check = Command::new("qemu-img").arg("check").arg(&path).output().unwrap();
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
}

/// Descriptors, heads and an index as a guest that has lost its mind may write them.
fn garbage() -> impl Strategy<Value = (Vec<RawDescriptor>, Vec<u16>, u16)> {
    let address = prop_oneof![
        4 => 0u64..LOW_MEMORY,
        1 => any::<u64>(),
        1 => HIGH_START..HIGH_START + 0x1000,
    ];
    let length = prop_oneof![4 => 0u32..2000, 1 => Just(16u32), 1 => Just(1u32), 1 => any::<u32>()];
    let next = prop_oneof![8 => 0u16..16, 1 => any::<u16>()];
    let descriptor = (address, length, prop_oneof![8 => 0u16..4, 1 => 0u16..8], next)
        .prop_map(|(address, length, flags, next)| RawDescriptor { address, length, flags, next });
    let head = prop_oneof![16 => 0u16..16, 1 => any::<u16>()];
    (
        prop::collection::vec(descriptor, 16),
        prop::collection::vec(head, 1..20),
        prop_oneof![8 => Just(0u16), 1 => any::<u16>()],
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn whatever_is_in_the_ring_the_device_lives_and_can_be_reset(
        (descriptors, heads, ahead) in garbage(),
        headers in prop::collection::vec(any::<u8>(), 0x2000),
    ) {
        let (mut driver, _) = started();
        // What descriptors point to are mostly headers of small numbers.
        let headers: Vec<u8> = headers.iter().map(|byte| byte % 16).collect();
        driver.write(0x8000, &headers);
        for (index, descriptor) in descriptors.iter().enumerate() {
            let mut descriptor = *descriptor;
            if descriptor.address < LOW_MEMORY / 2 {
                descriptor.address = 0x8000 + descriptor.address % 0x2000;
            }
            driver.set_descriptor(0, index as u16, descriptor);
        }
        for head in heads {
            driver.publish(0, head);
        }
        let index = driver.queues[0].available_index.wrapping_add(ahead);
        driver.set_available_index(0, index);
        driver.kick_anyway(0);
        driver.settle(Duration::from_millis(200));
        driver.transport.pause(true);
        driver.transport.pause(false);
        driver.bring_up(u64::MAX);
        let room = driver.room(512);
        prop_assert_eq!(ask(&mut driver, READ, 1, &[room]), OK);
    }
}
