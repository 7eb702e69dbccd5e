use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;
use crate::testing::{Driver, HIGH_START, LOW_MEMORY, MOMENT};
use crate::virtio::DeviceError;

/// What the device was asked for.
#[derive(Default)]
struct Calls {
    activations: Mutex<Vec<Activation>>,
    resets: AtomicU64,
    closes: AtomicU64,
}

struct Dummy {
    calls: Arc<Calls>,
    fails: bool,
}

impl VirtioDevice for Dummy {
    fn id(&self) -> u32 {
        42
    }

    fn name(&self) -> String {
        "dummy".into()
    }

    fn features(&self) -> u64 {
        0b1001 | 1 << 40
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64, 16]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(offset as u8);
    }

    fn activate(&mut self, activation: Activation, _: &Arc<dyn Surroundings>) -> Result<(), DeviceError> {
        if self.fails {
            return Err(DeviceError::QueueMissing(7));
        }
        self.calls.activations.lock().unwrap().push(activation);
        Ok(())
    }

    fn reset(&mut self) {
        self.calls.resets.fetch_add(1, Ordering::SeqCst);
    }

    fn close(&mut self) -> io::Result<()> {
        self.calls.closes.fetch_add(1, Ordering::SeqCst);
        Err(io::Error::other("the disk is gone"))
    }
}

fn dummy() -> (Driver, Arc<Calls>) {
    let calls = Arc::new(Calls::default());
    (Driver::new(Box::new(Dummy { calls: calls.clone(), fails: false })), calls)
}

#[test]
fn the_registers_name_the_device() {
    let (driver, _) = dummy();
    assert_eq!(driver.get(register::MAGIC).to_le_bytes(), *b"virt");
    assert_eq!((driver.get(register::VERSION), driver.get(register::DEVICE_ID)), (2, 42));
    assert_eq!(driver.offered(), 0b1001 | 1 << 40 | feature::TRANSPORT);
    driver.set(register::DEVICE_FEATURES_SELECT, 2);
    assert_eq!(driver.get(register::DEVICE_FEATURES), 0);
    let sizes = [0, 1, 2, u32::MAX].map(|index| {
        driver.set(register::QUEUE_SELECT, index);
        driver.get(register::QUEUE_SIZE_MAX)
    });
    assert_eq!(sizes, [64, 16, 0, 0]);
    for shared in [0xb0, 0xb4, 0xb8, 0xbc] {
        assert_eq!(driver.get(shared), u32::MAX);
    }
    assert_eq!(driver.config::<2>(5), [5, 5]);
}

#[test]
fn accesses_of_another_width_or_place_change_nothing_and_read_zeros() {
    let (driver, calls) = dummy();
    let mut data = [1; 8];
    for (offset, width) in [(0, 1), (0, 2), (0, 8), (2, 4), (0x1f, 4), (0xf8, 4)] {
        driver.transport.read(offset, &mut data[..width]);
        assert!(data[..width].iter().all(|byte| *byte == 0), "{offset:#x}");
        data.fill(1);
    }
    driver.transport.write(register::STATUS, &[1]);
    driver.transport.write(register::STATUS + 1, &[1, 0, 0, 0]);
    for offset in (0..0x100).step_by(4).filter(|offset| *offset != register::STATUS) {
        driver.set(offset, u32::MAX);
        driver.set(offset, 1);
    }
    assert_eq!(driver.status(), 0);
    assert!(calls.activations.lock().unwrap().is_empty());
}

#[test]
fn a_driver_that_follows_the_list_gets_its_queues_to_the_device() {
    let (mut driver, calls) = dummy();
    driver.bring_up(0b1000 | feature::EVENT_INDEX);
    let activations = calls.activations.lock().unwrap();
    let [activation] = &activations[..] else { panic!("{} activations", activations.len()) };
    assert_eq!(activation.features, 0b1000 | feature::EVENT_INDEX | feature::VERSION_1);
    for (index, queue) in activation.queues.iter().enumerate() {
        let (queue, driven) = (&queue.as_ref().unwrap().queue, &driver.queues[index]);
        assert!(queue.is_valid(&driver.memory) && queue.event_idx_enabled());
        let addresses = (queue.desc_table(), queue.avail_ring(), queue.used_ring());
        assert_eq!(addresses, (driven.descriptors, driven.available, driven.used));
    }
    driver.kick_anyway(1);
    driver.kick_anyway(2);
    assert_eq!(activation.queues[1].as_ref().unwrap().kick.read().unwrap(), 1);
    drop(activations);
    driver.reset();
    assert_eq!((driver.status(), calls.resets.load(Ordering::SeqCst)), (0, 1));
    driver.bring_up(0);
    assert_eq!(calls.activations.lock().unwrap().len(), 2);
}

#[test]
fn features_that_were_not_offered_or_without_version_1_are_not_accepted() {
    let (driver, _) = dummy();
    for features in [0, 1, feature::VERSION_1 | 2, feature::VERSION_1 | 1 << 63] {
        driver.set(register::STATUS, 0);
        driver.add_status(status::ACKNOWLEDGE);
        driver.add_status(status::DRIVER);
        driver.set_features(features);
        driver.add_status(status::FEATURES_OK);
        assert_eq!(driver.status(), status::ACKNOWLEDGE | status::DRIVER, "{features:#x}");
    }
    driver.set_features(feature::VERSION_1 | 8);
    driver.add_status(status::FEATURES_OK);
    driver.set_features(feature::VERSION_1 | 1);
    driver.add_status(status::DRIVER_OK);
    assert_eq!(driver.status(), 0b1111);
}

#[test]
fn steps_out_of_order_are_ignored() {
    let (driver, calls) = dummy();
    for bit in [status::DRIVER, status::FEATURES_OK, status::DRIVER_OK, status::NEEDS_RESET, 0x20] {
        driver.set(register::STATUS, bit);
        assert_eq!(driver.status(), 0);
    }
    driver.set(register::STATUS, status::ACKNOWLEDGE | status::FEATURES_OK | status::DRIVER_OK);
    assert_eq!(driver.status(), status::ACKNOWLEDGE);
    driver.set_features(feature::VERSION_1);
    driver.set(register::STATUS, status::DRIVER);
    driver.add_status(status::FEATURES_OK);
    assert_eq!(driver.status(), status::ACKNOWLEDGE | status::DRIVER, "features came before DRIVER");
    driver.add_status(status::FAILED);
    driver.set_features(feature::VERSION_1);
    driver.add_status(status::FEATURES_OK | status::DRIVER_OK);
    assert!(calls.activations.lock().unwrap().is_empty(), "the driver has given up");
}

#[test]
fn a_queue_that_cannot_be_breaks_the_device_with_the_reason() {
    let cases = [
        (3, [0x1000, 0x2000, 0x3000], "its size 3 is not"),
        (0, [0x1000, 0x2000, 0x3000], "its size 0 is not"),
        (128, [0x1000, 0x2000, 0x3000], "its size 128 is not"),
        (0x10040, [0x1000, 0x2000, 0x3000], "its size 65600 is not"),
        (64, [0x1008, 0x2000, 0x3000], "its descriptor table at 0x1008 is not aligned to 16"),
        (64, [0x1000, 0x2001, 0x3000], "its available ring at 0x2001 is not aligned to 2"),
        (64, [0x1000, 0x2000, 0x3002], "its used ring at 0x3002 is not aligned to 4"),
        (64, [LOW_MEMORY - 16, 0x2000, 0x3000], "is not inside memory"),
        (64, [0x1000, u64::MAX - 1, 0x3000], "is not inside memory"),
        (64, [0x1000, 0x2000, HIGH_START - 4], "is not inside memory"),
        (64, [u64::MAX - 15, 0x2000, 0x3000], "is not inside memory"),
    ];
    for (size, addresses, expected) in cases {
        let (mut driver, calls) = dummy();
        driver.negotiate(0);
        driver.set(register::QUEUE_SIZE, size);
        for (low, address) in [0x80, 0x90, 0xa0].into_iter().zip(addresses) {
            driver.set(low, address as u32);
            driver.set(low + 4, (address >> 32) as u32);
        }
        driver.set(register::QUEUE_READY, 1);
        assert_eq!(driver.get(register::QUEUE_READY), 0);
        assert!(driver.host.wait_broken().contains(expected), "{:?}", driver.host.told());
        driver.add_status(status::DRIVER_OK);
        assert!(calls.activations.lock().unwrap().is_empty());
        assert_ne!(driver.status() & status::NEEDS_RESET, 0);
        driver.bring_up(0);
        assert_eq!(calls.activations.lock().unwrap().len(), 1, "a reset heals it");
    }
}

#[test]
fn a_ready_queue_is_not_changed_and_one_taken_away_in_use_stops_the_device() {
    let (mut driver, calls) = dummy();
    driver.negotiate(0);
    driver.set_up_queue(0, 16);
    driver.set(register::DESCRIPTORS_LOW, 0xdead_0000);
    driver.set(register::QUEUE_SIZE, 8);
    driver.set(register::QUEUE_READY, 0);
    driver.set(register::QUEUE_SIZE, 8);
    driver.set(register::QUEUE_READY, 1);
    driver.add_status(status::DRIVER_OK);
    {
        let activations = calls.activations.lock().unwrap();
        let queue = &activations[0].queues[0].as_ref().unwrap().queue;
        assert_eq!((queue.size(), queue.desc_table()), (8, driver.queues[0].descriptors));
        assert!(activations[0].queues[1].is_none(), "the driver left it out");
    }
    driver.set(register::QUEUE_READY, 0);
    assert_eq!((driver.get(register::QUEUE_READY), calls.resets.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(driver.host.wait_broken(), "queue 0 was taken away in use");
    assert!(driver.wait_interrupt(MOMENT), "a running driver is told");
}

#[test]
fn a_device_that_cannot_begin_is_broken_and_says_why() {
    let mut driver = Driver::new(Box::new(Dummy { calls: Arc::default(), fails: true }));
    driver.bring_up(0);
    assert_eq!(driver.host.wait_broken(), "it can't be started: queue 7 is not there");
    assert_eq!(driver.status(), 0b1111 | status::NEEDS_RESET);
}

#[test]
fn a_broken_device_interrupts_once_and_late_words_of_an_earlier_life_are_dropped() {
    let (mut driver, calls) = dummy();
    driver.bring_up(0);
    let broken = Arc::clone(&calls.activations.lock().unwrap()[0].broken);
    let generation = driver.get(register::CONFIG_GENERATION);
    broken("first");
    broken("second");
    assert_eq!(driver.get(register::INTERRUPT_STATUS), 2);
    assert_ne!(driver.get(register::CONFIG_GENERATION), generation);
    assert_eq!(driver.host.told().broken, [("dummy".to_owned(), "first".to_owned())]);
    driver.bring_up(0);
    broken("late");
    assert_eq!((driver.status(), driver.get(register::INTERRUPT_STATUS)), (0b1111, 0));
}

#[test]
fn an_acknowledgement_takes_back_what_was_seen_and_nothing_later() {
    let (mut driver, calls) = dummy();
    driver.bring_up(0);
    let interrupt = Arc::clone(&calls.activations.lock().unwrap()[0].interrupt);
    interrupt.used();
    assert_eq!(driver.get(register::INTERRUPT_STATUS), 1);
    interrupt.used();
    interrupt.config_changed();
    driver.set(INTERRUPT_ACKNOWLEDGE, 3);
    assert_eq!(driver.get(register::INTERRUPT_STATUS), 3, "neither was seen before");
    driver.set(INTERRUPT_ACKNOWLEDGE, 1);
    assert_eq!(driver.get(register::INTERRUPT_STATUS), 2);
    driver.set(INTERRUPT_ACKNOWLEDGE, u32::MAX);
    assert_eq!(driver.get(register::INTERRUPT_STATUS), 0);
}

#[test]
fn close_tells_the_devices_error_once_and_ends_all_change() {
    let (mut driver, calls) = dummy();
    driver.bring_up(0);
    assert_eq!(driver.transport.close().unwrap_err().to_string(), "the disk is gone");
    assert!(driver.transport.close().is_ok());
    driver.reset();
    assert_eq!(calls.closes.load(Ordering::SeqCst), 1);
    assert_eq!(calls.resets.load(Ordering::SeqCst), 0);
}

proptest! {
    #[test]
    fn no_sequence_of_writes_gets_a_bad_queue_to_the_device_or_spoils_the_next_start(
        writes in prop::collection::vec(
            (
                prop_oneof![8 => (0u64..64).prop_map(|at| at * 4), 1 => 0u64..0x1010, 1 => any::<u64>()],
                prop_oneof![4 => 0u32..20, 2 => (0u32..5).prop_map(|bits| (2 << bits) - 1), 1 => any::<u32>()],
                prop_oneof![8 => Just(4usize), 1 => 1usize..=8],
            ),
            0..200,
        ),
    ) {
        let (mut driver, calls) = dummy();
        driver.negotiate(0);
        for (offset, value, width) in writes {
            let bytes = [value.to_le_bytes(), [0; 4]].concat();
            driver.transport.write(offset, &bytes[..width]);
            let mut data = [0; 8];
            driver.transport.read(offset, &mut data[..width]);
        }
        for activation in calls.activations.lock().unwrap().iter() {
            for queue in activation.queues.iter().flatten() {
                prop_assert!(queue.queue.is_valid(&activation.memory));
            }
        }
        let before = calls.activations.lock().unwrap().len();
        driver.bring_up(u64::MAX);
        prop_assert_eq!(calls.activations.lock().unwrap().len(), before + 1);
        prop_assert_eq!(driver.status(), 0b1111);
    }
}
