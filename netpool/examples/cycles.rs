//! Measures what a start and a stop cost on this host: `cargo run --release -p torpor-netpool --example cycles [CYCLES [AT-ONCE]]`,
//! as root. It works in a network namespace of its own.

use std::error::Error;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use torpor_netpool::linux::{Network, Tap, TapOptions};
use torpor_netpool::{GuestNet, PoolConfig, Slot};

/// As many TAPs are deleted one by one for comparison.
const ONE_BY_ONE: u32 = 100;

/// Sums over all cycles.
#[derive(Default)]
struct Sums {
    attach: Duration,
    detach: Duration,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let cycles: u32 = words.next().map_or(Ok(1000), |word| word.parse())?;
    let at_once: u32 = words.next().map_or(Ok(50), |word| word.parse())?;
    unshare(CloneFlags::CLONE_NEWNET)?;
    let config = PoolConfig { warm_taps: at_once * 4, ..PoolConfig::default() };
    let options = TapOptions { vnet_hdr: true, mtu: Some(1500), ..TapOptions::default() };
    let network = Network::new(&config);
    let began = Instant::now();
    network.firewall().ensure()?;
    println!("firewall's table made in {:.1?}", began.elapsed());
    let began = Instant::now();
    let made = network.tend()?.stock.made;
    println!(
        "{made} TAPs made in advance in {:.1?}: {:.2?} each",
        began.elapsed(),
        began.elapsed() / made as u32
    );

    for with_stock in [true, false] {
        let (sums, whole) = run(&network, &config, &options, cycles, at_once, with_stock)?;
        let how = if with_stock { "from stock" } else { "made and deleted" };
        println!(
            "{cycles} cycles, {at_once} at a time, TAPs {how}: {:.3?} per cycle, the ends of the processes included",
            whole / cycles
        );
        let (attach, detach) = (sums.attach / cycles, sums.detach / cycles);
        println!(
            "    one caller waits {attach:.3?} for acquire and {detach:.3?} for release, with the others before it: {:.3?} each",
            (attach + detach) / at_once
        );
    }
    let began = Instant::now();
    network.settle()?;
    println!("connections of all addresses forgotten in {:.1?}", began.elapsed());
    let began = Instant::now();
    println!("stock of {} TAPs deleted as one group in {:.1?}", network.stock().clear()?, began.elapsed());
    let taps = (0..ONE_BY_ONE)
        .map(|n| Tap::create(&config.guest_net("sb", Slot(n))?, &options).map_err(Box::<dyn Error>::from))
        .collect::<Result<Vec<_>, _>>()?;
    let began = Instant::now();
    for tap in &taps {
        Command::new("ip").args(["link", "del", tap.name()]).status()?;
    }
    println!("ip link del, one by one: {:.1?} each", began.elapsed() / ONE_BY_ONE);
    Ok(())
}

fn run(
    network: &Network,
    config: &PoolConfig,
    options: &TapOptions,
    cycles: u32,
    at_once: u32,
    with_stock: bool,
) -> Result<(Sums, Duration), Box<dyn Error>> {
    let (next, sums, failed) = (AtomicU32::new(0), Mutex::new(Sums::default()), Mutex::new(None));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(n) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|n| *n < cycles) {
                    let one = config
                        .guest_net(&format!("sb-{n}"), Slot(n))
                        .map_err(Box::<dyn Error + Send + Sync>::from);
                    let result = one.and_then(|net| cycle(network, &net, options, with_stock));
                    match (result, sums.lock(), failed.lock()) {
                        (Ok((attach, detach)), Ok(mut sums), _) => {
                            sums.attach += attach;
                            sums.detach += detach;
                        }
                        (Err(error), _, Ok(mut failed)) => *failed = Some(error.to_string()),
                        _ => {}
                    }
                }
            });
        }
    });
    let whole = began.elapsed();
    match failed.into_inner()? {
        Some(error) => Err(error.into()),
        None => Ok((sums.into_inner()?, whole)),
    }
}

fn cycle(
    network: &Network,
    net: &GuestNet,
    options: &TapOptions,
    with_stock: bool,
) -> Result<(Duration, Duration), Box<dyn Error + Send + Sync>> {
    let began = Instant::now();
    let tap = match with_stock {
        true => network.attach(net, options)?,
        false => torpor_netpool::linux::attach(network.firewall(), net, options)?,
    };
    let attach = began.elapsed();
    // The VM's process ends: what the kernel does then isn't the pool's time.
    drop(tap);
    let began = Instant::now();
    match with_stock {
        true => network.detach(net)?,
        false => torpor_netpool::linux::detach(network.firewall(), net)?,
    }
    Ok((attach, began.elapsed()))
}
