//! Foreign images, read: what qemu-img makes is read as qemu-img reads it.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use std::path::{Path, PathBuf};

use common::model::{Random, content};
use common::{Bench, base_content, qemu_tools, run, text};
use torpor_overlay::{Block, Format, Image, Raw, export, inspect, open};

const MIB: u64 = 1 << 20;

/// Contents of all kinds: noise, text that compresses, zeros, the base's.
fn raw_disk(bench: &Bench, size: u64) -> PathBuf {
    let mut random = Random::new(11);
    let mut bytes = base_content(size);
    for chunk in bytes.chunks_mut(50_000) {
        match random.below(4) {
            0 => chunk.copy_from_slice(&random.bytes(chunk.len())),
            1 => chunk.fill(0),
            2 => chunk.iter_mut().zip("lorem ipsum ".bytes().cycle()).for_each(|(to, from)| *to = from),
            _ => {}
        }
    }
    let path = bench.path("disk.raw");
    std::fs::write(&path, &bytes).unwrap();
    path
}

/// The image's content, read whole, then in small pieces of any alignment, equals what qemu-img makes of it.
fn assert_same(bench: &Bench, image: &Path, backing: Option<Box<dyn Block>>, what: &str) {
    let flat = bench.path("flat.raw");
    run("qemu-img", &["convert", "-O", "raw", text(image), text(&flat)]);
    let expected = std::fs::read(&flat).unwrap();
    let disk = Image::open(image, backing).unwrap();
    assert!(content(&disk) == expected, "{what}");
    let mut random = Random::new(5);
    for _ in 0..200 {
        let length = random.below(20_000).min(disk.size()) as usize;
        let at = random.below(disk.size() - length as u64 + 1);
        let mut found = vec![0xee; length];
        let (head, tail) = found.split_at_mut(length / 3);
        disk.readv(&mut [std::io::IoSliceMut::new(head), std::io::IoSliceMut::new(tail)], at).unwrap();
        assert!(found == expected[at as usize..at as usize + length], "{what}: {length} bytes at {at}");
    }
}

/// Options of `qemu-img create`.
fn kinds() -> Vec<String> {
    let mut kinds: Vec<String> = [512, 4096, 65_536, 2_097_152]
        .iter()
        .flat_map(|size| ["0.10", "1.1"].map(|compat| format!("compat={compat},cluster_size={size}")))
        .collect();
    kinds.push("compat=1.1,lazy_refcounts=on".to_owned());
    kinds.extend([16_384, 65_536, 2_097_152].map(|size| format!("extended_l2=on,cluster_size={size}")));
    kinds
}

#[test]
fn images_of_every_kind_compressed_and_not_are_read_as_qemu_reads_them() {
    if !qemu_tools("images_of_every_kind_compressed_and_not_are_read_as_qemu_reads_them") {
        return;
    }
    let bench = Bench::new(MIB);
    let raw = raw_disk(&bench, 3 * MIB + 512);
    let image = bench.path("image.qcow2");
    for kind in kinds() {
        for compressed in [false, true] {
            let mut arguments = vec!["convert", "-f", "raw", "-O", "qcow2", "-o", &kind];
            arguments.extend(compressed.then_some("-c"));
            arguments.extend([text(&raw), text(&image)]);
            run("qemu-img", &arguments);
            assert_same(&bench, &image, None, &format!("{kind}, compressed: {compressed}"));
        }
    }
}

#[test]
fn images_with_a_base_and_changes_of_every_kind_are_read_as_qemu_reads_them() {
    if !qemu_tools("images_with_a_base_and_changes_of_every_kind_are_read_as_qemu_reads_them") {
        return;
    }
    let bench = Bench::new(2 * MIB + 100 * 512);
    let middle = bench.path("middle.qcow2");
    run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&bench.base), text(&middle)]);
    let image = bench.path("image.qcow2");
    for kind in kinds() {
        for (base, format) in [(&bench.base, "raw"), (&middle, "qcow2")] {
            let _ = std::fs::remove_file(&image);
            let arguments =
                ["create", "-f", "qcow2", "-o", &kind, "-b", text(base), "-F", format, text(&image), "4M"];
            run("qemu-img", &arguments);
            change(&image, &kind);
            let backing: Box<dyn Block> = match format {
                "raw" => Box::new(Raw::open_read_only(base).unwrap()),
                _ => Box::new(Image::open(base, None).unwrap()),
            };
            assert_same(&bench, &image, Some(backing), &format!("{kind} over {format}"));
        }
    }
}

/// Writes of every kind by qemu-io, at places that differ.
fn change(image: &Path, kind: &str) {
    let mut random = Random::new(kind.len() as u64);
    let cluster = if kind.contains("2097152") { 2 * MIB } else { 65_536 };
    // QEMU compresses only into clusters that it doesn't have yet.
    let mut commands: Vec<String> = (0..4 * MIB / cluster)
        .step_by(7)
        .map(|number| format!("write -c -P {} {} {cluster}", number + 100, number * cluster))
        .collect();
    for number in 0..25 {
        let (at, length) = (random.below(6000) * 512, random.below(150) * 512 + 512);
        commands.push(match number % 4 {
            0 | 1 => format!("write -P {} {at} {length}", number + 1),
            2 => format!("write -z {at} {length}"),
            _ => format!("discard {at} {length}"),
        });
    }
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let arguments: Vec<&str> = ["-f", "qcow2"].into_iter().chain(commands).chain([text(image)]).collect();
    run("qemu-io", &arguments);
}

#[test]
fn foreign_features_are_refused_for_writing_and_nothing_is_written() {
    if !qemu_tools("foreign_features_are_refused_for_writing_and_nothing_is_written") {
        return;
    }
    let bench = Bench::new(MIB);
    let raw = raw_disk(&bench, MIB);
    let image = bench.path("image.qcow2");
    for kind in kinds() {
        run(
            "qemu-img",
            &["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &kind, text(&raw), text(&image)],
        );
        let before = std::fs::read(&image).unwrap();
        let error = open(&image, &[]).unwrap_err();
        assert_eq!(error.reason(), "UNSUPPORTED", "{kind}");
        assert!(error.to_string().contains("import it first"), "{error}");
        assert!(std::fs::read(&image).unwrap() == before);
    }
}

#[test]
fn an_overlay_that_another_program_compressed_into_is_read_but_not_written_to() {
    if !qemu_tools("an_overlay_that_another_program_compressed_into_is_read_but_not_written_to") {
        return;
    }
    let bench = Bench::new(MIB);
    let path = bench.overlay(2 * MIB);
    run("qemu-io", &["-f", "qcow2", "-c", "write -c -P 7 65536 131072", text(&path)]);
    let error = open(&path, &[&bench.base]).unwrap_err();
    assert_eq!(error.reason(), "UNSUPPORTED");
    assert!(error.to_string().contains("compressed 2 clusters"), "{error}");
    let backing: Box<dyn Block> = Box::new(Raw::open_read_only(&bench.base).unwrap());
    assert_same(&bench, &path, Some(backing), "compressed");
}

#[test]
fn a_compressed_image_is_imported() {
    if !qemu_tools("a_compressed_image_is_imported") {
        return;
    }
    let bench = Bench::new(MIB);
    let raw = raw_disk(&bench, 2 * MIB);
    let (image, imported) = (bench.path("image.qcow2"), bench.path("imported.qcow2"));
    run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]);
    export(&Image::open(&image, None).unwrap(), &imported, Format::Qcow2, &mut |_, _| {}).unwrap();
    assert!(inspect(&imported).unwrap().ours);
    let disk = open(&imported, &[]).unwrap();
    assert!(content(&disk) == std::fs::read(&raw).unwrap());
    disk.close().unwrap();
}

/// The first L2 entry with content, as offset and value.
fn first_entry(bytes: &[u8], width: usize) -> (usize, u64) {
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = number(40) as usize;
    let l2 = (number(l1) & 0x00ff_ffff_ffff_fe00) as usize;
    let at = (0..).map(|index| l2 + index * width).find(|at| number(*at) != 0).unwrap();
    (at, number(at))
}

#[test]
fn damaged_compressed_clusters_are_errors_and_the_rest_is_read() {
    if !qemu_tools("damaged_compressed_clusters_are_errors_and_the_rest_is_read") {
        return;
    }
    let bench = Bench::new(MIB);
    let image = bench.path("image.qcow2");
    run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&bench.base), text(&image)]);
    let sound = std::fs::read(&image).unwrap();
    let (at, entry) = first_entry(&sound, 8);
    let offset = (entry & ((1 << 54) - 1)) as usize;
    let mut damaged = sound.clone();
    damaged[offset..offset + 64].fill(0xff);
    let mut far = sound.clone();
    far[at..at + 8].copy_from_slice(&(1u64 << 62 | 0xff << 54 | ((1 << 54) - 1)).to_be_bytes());
    let mut short = sound.clone();
    short.truncate(offset + 10);
    for (bytes, what) in [(damaged, "nonsense"), (far, "beyond the file"), (short, "cut")] {
        std::fs::write(&image, &bytes).unwrap();
        let disk = Image::open(&image, None).unwrap();
        let error = disk.read(&mut [0; 100], 0).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{what}: {error}");
        if what == "nonsense" {
            disk.read(&mut [0; 100], 3 * 65_536).unwrap();
        }
    }
}

#[test]
fn a_subcluster_that_is_both_there_and_zero_is_damage() {
    if !qemu_tools("a_subcluster_that_is_both_there_and_zero_is_damage") {
        return;
    }
    let bench = Bench::new(MIB);
    let image = bench.path("image.qcow2");
    run(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "qcow2", "-o", "extended_l2=on", text(&bench.base), text(&image)],
    );
    let mut bytes = std::fs::read(&image).unwrap();
    let (at, _) = first_entry(&bytes, 16);
    bytes[at + 8..at + 16].copy_from_slice(&(1u64 << 3 | 1 << 35 | 1).to_be_bytes());
    std::fs::write(&image, &bytes).unwrap();
    let disk = Image::open(&image, None).unwrap();
    disk.read(&mut [0; 100], 0).unwrap();
    assert_eq!(disk.read(&mut [0; 100], 3 * 2048).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
}

#[test]
fn the_last_clusters_that_were_inflated_are_kept() {
    if !qemu_tools("the_last_clusters_that_were_inflated_are_kept") {
        return;
    }
    let bench = Bench::new(MIB);
    let image = bench.path("image.qcow2");
    run("qemu-img", &["convert", "-c", "-f", "raw", "-O", "qcow2", text(&bench.base), text(&image)]);
    let disk = Image::open(&image, None).unwrap();
    let mut first = vec![0; 65_536];
    disk.read(&mut first, 0).unwrap();
    // What is in the file now no longer matters for that cluster.
    let mut bytes = std::fs::read(&image).unwrap();
    let offset = (first_entry(&bytes, 8).1 & ((1 << 54) - 1)) as usize;
    bytes[offset..offset + 64].fill(0xff);
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).unwrap();
    for at in (0..65_536).step_by(512) {
        let mut found = [0; 512];
        disk.read(&mut found, at).unwrap();
        assert!(found == first[at as usize..at as usize + 512]);
    }
}
