use super::*;
use crate::testing::{Buffer, Driver, HIGH_MEMORY, HIGH_START, LOW_MEMORY, RawDescriptor, flag};

const DEFLATE: usize = 1;

fn device() -> (Driver, BalloonHandle) {
    let balloon = Balloon::new().unwrap();
    let handle = balloon.handle();
    (Driver::start(Box::new(balloon)), handle)
}

/// Hands page numbers over.
fn hand_over(driver: &mut Driver, queue: usize, pages: &[u32]) {
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    let list = driver.buffer(&bytes);
    assert_eq!(driver.request(queue, &[list]), 0);
}

fn filled(driver: &Driver, page: u64) -> bool {
    let bytes = driver.read(page * PAGE, PAGE as usize);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is torn");
    bytes[0] != 0
}

fn fill(driver: &Driver, pages: std::ops::Range<u64>) {
    pages.for_each(|page| driver.write(page * PAGE, &[0xaa; PAGE as usize]));
}

#[test]
fn pages_that_are_handed_over_go_back_to_the_host_and_no_others_do() {
    let (mut driver, handle) = device();
    fill(&driver, 1000..1010);
    let high = HIGH_START / PAGE;
    fill(&driver, high..high + 1);
    // In any order, one of them twice.
    hand_over(&mut driver, INFLATE, &[1003, 1002, 1001, 1007, 1002, high as u32]);
    let gone: Vec<u64> = (1000..1010).filter(|page| !filled(&driver, *page)).collect();
    assert_eq!(gone, [1001, 1002, 1003, 1007]);
    assert!(!filled(&driver, high));
    assert_eq!(handle.reclaimed(), 5 * PAGE);
    hand_over(&mut driver, DEFLATE, &[1001]);
    driver.write(1001 * PAGE, b"mine again");
    assert_eq!(driver.read(1001 * PAGE, 10), b"mine again");
}

#[test]
fn reported_ranges_go_back_in_whole_pages() {
    let (mut driver, handle) = device();
    fill(&driver, 2000..2008);
    let range = |from: u64, length: u32| Buffer { address: from, length, writable: true };
    // The second begins and ends inside pages: only the page between goes.
    let ranges =
        [range(2000 * PAGE, 8192), range(2003 * PAGE + 1, 8191 + 100), range(HIGH_START, HIGH_MEMORY as u32)];
    assert_eq!(driver.request(REPORTS, &ranges), 0);
    let gone: Vec<u64> = (2000..2008).filter(|page| !filled(&driver, *page)).collect();
    assert_eq!(gone, [2000, 2001, 2004]);
    assert_eq!(handle.reclaimed(), 3 * PAGE + HIGH_MEMORY);
}

#[test]
fn a_shared_file_s_pages_leave_the_file() {
    let (mut device, file) = (Balloon::new().unwrap(), tempfile::tempfile().unwrap());
    file.set_len(1 << 20).unwrap();
    let offset = vm_memory::FileOffset::new(file.try_clone().unwrap(), 0);
    let start = vm_memory::GuestAddress(0);
    let memory = Memory::from_ranges_with_files([(start, 1 << 20, Some(offset))]).unwrap();
    vm_memory::Bytes::write_slice(&memory, &[1; 1 << 20], start).unwrap();
    let pages = Pages::new(&memory, Arc::clone(&device.shared));
    pages.let_go_guest(16 * PAGE, 64 * PAGE);
    let mut bytes = vec![9; 1 << 20];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
    let zeros = bytes.iter().filter(|byte| **byte == 0).count() as u64;
    // A file system that can't punch holes keeps them; then nothing counts as reclaimed.
    assert_eq!(zeros, device.handle().reclaimed());
    device.reset();
}

#[test]
fn the_target_is_told_and_the_guest_says_what_it_has_done() {
    let (mut driver, handle) = device();
    handle.set_target_bytes(10 * PAGE + 1);
    assert!(driver.wait_interrupt(crate::testing::PATIENCE));
    assert_eq!(driver.config::<4>(0), 10_u32.to_le_bytes());
    crate::bus::BusDevice::write(&*driver.transport, 0x100 + ACTUAL as u64, &7_u32.to_le_bytes());
    assert_eq!(handle.actual(), 7 * PAGE);
    driver.reset();
    assert_eq!(handle.actual(), 0, "a new driver begins with an empty balloon");
    handle.set_target_bytes(u64::MAX);
    assert_eq!(driver.config::<4>(0), [0xff; 4]);
    assert_eq!(driver.config::<8>(12), [0; 8]);
    for offset in [0, 1, 3, 5, 8, 4096, u64::MAX - 0x200] {
        crate::bus::BusDevice::write(&*driver.transport, 0x100 + offset, &[0xff; 8]);
    }
    assert_eq!(handle.actual(), 0);
}

#[test]
fn page_numbers_outside_memory_are_left_alone() {
    let (mut driver, handle) = device();
    let edge = (LOW_MEMORY / PAGE) as u32;
    fill(&driver, u64::from(edge) - 1..u64::from(edge));
    hand_over(&mut driver, INFLATE, &[u32::MAX, u32::MAX - 1, edge, edge + 1, 0x000f_ffff, 0x0010_2000]);
    assert_eq!(handle.reclaimed(), 0);
    hand_over(&mut driver, INFLATE, &[edge + 1, edge, edge - 1]);
    assert_eq!(handle.reclaimed(), PAGE, "of a run over the edge only what is inside goes");
    let odd = driver.buffer(&[1, 2, 3]);
    assert_eq!(driver.request(INFLATE, &[odd]), 0, "no whole number in it");
}

#[test]
fn many_requests_at_once_are_all_served_for_one_kick() {
    let (mut driver, handle) = device();
    fill(&driver, 1000..1064);
    for page in 1000_u32..1064 {
        let list = driver.buffer(&page.to_le_bytes());
        driver.add(INFLATE, &[list]);
    }
    driver.kick(INFLATE);
    for _ in 0..64 {
        driver.wait(INFLATE);
    }
    assert_eq!(handle.reclaimed(), 64 * PAGE);
}

#[test]
fn lists_without_end_and_broken_rings_break_the_device() {
    let (mut driver, _) = device();
    let list = Buffer { address: 1 << 20, length: (MAX_REQUEST + 4) as u32, writable: false };
    driver.add(INFLATE, &[list]);
    driver.kick(INFLATE);
    assert!(driver.host.wait_broken().contains("a list of 4100 bytes"));
    for queue in 0..3 {
        let (mut driver, _) = device();
        let looping = RawDescriptor { address: 0x1000, length: 4, flags: flag::NEXT, next: 0 };
        driver.set_descriptor(queue, 0, looping);
        driver.publish(queue, 0);
        driver.kick_anyway(queue as u32);
        assert!(driver.host.wait_broken().contains(&format!("queue {queue}")));
    }
}
