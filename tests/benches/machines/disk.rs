//! In-guest direct I/O on a qcow2 overlay over a raw base, at queue depth 1.

use std::{collections::BTreeMap, fs};

use torpor_overlay::{BaseIdentity, create, sha256_file};

use crate::{
    LIMIT, MEMORY, command_line,
    machine::{Bench, Outcome, Which},
};

const DISK_BYTES: u64 = 256 << 20;
const ROUNDS: usize = 3;

/// Operations a second by kind of work, in the guest's order.
type Figures = Vec<(String, f64)>;

pub(crate) fn run(bench: &Bench) -> Outcome<()> {
    let base = bench.folder.path().join("base.raw");
    // Not zeros: nothing may be left out.
    fs::write(&base, vec![0x11; DISK_BYTES as usize / 8])?;
    fs::File::options().write(true).open(&base)?.set_len(DISK_BYTES)?;
    let identity = BaseIdentity { digest: sha256_file(&base)?, size: DISK_BYTES };
    let mut all: BTreeMap<&str, Vec<Figures>> = BTreeMap::new();
    for round in 0..ROUNDS {
        for (name, which) in [("ours", Which::Torpor), ("theirs", Which::Qemu)] {
            let overlay = bench.folder.path().join(format!("overlay-{name}-{round}.qcow2"));
            create(&overlay, &base, &identity, DISK_BYTES)?;
            let mut job = bench.job(&format!("{} torpor.test=disk", command_line(MEMORY)));
            job.disk = Some((overlay.clone(), base.clone()));
            eprintln!("disk: round {round}, {name}");
            let console = bench.start(which, &job)?.finish(LIMIT)?;
            all.entry(name).or_default().push(figures(&console)?);
            fs::remove_file(&overlay)?;
        }
    }
    println!(
        "operations a second in the guest, virtual clock, queue depth 1, qcow2 overlay over a raw base, median of {ROUNDS}"
    );
    let median = |name: &str, kind: usize| {
        let mut values: Vec<f64> = all[name].iter().map(|figures| figures[kind].1).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    for (kind, (name, _)) in all["ours"][0].iter().enumerate() {
        let (ours, theirs) = (median("ours", kind), median("theirs", kind));
        println!("RESULT disk | {name} | {ours:.0} | {theirs:.0} | ratio {:.2}", ours / theirs);
    }
    Ok(())
}

fn figures(console: &str) -> Outcome<Figures> {
    let lines = console.lines().filter_map(|line| line.trim().strip_prefix("RESULT "));
    let figures: Figures = lines
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let (name, operations, nanoseconds) = (words.next()?, words.next()?, words.next()?);
            Some((name.to_owned(), operations.parse::<f64>().ok()? * 1e9 / nanoseconds.parse::<f64>().ok()?))
        })
        .collect();
    if figures.len() < 6 { Err(format!("the guest did not finish: {console}").into()) } else { Ok(figures) }
}
