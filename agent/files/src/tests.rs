use std::{
    fs,
    os::unix::{
        ffi::OsStrExt as _,
        fs::{MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::Path,
};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use super::*;

const OPTIONS: Options = Options { owner: None, mode_mask: 0o7777, keep_partial: false, flush: true };
const RESUMABLE: Options = Options { keep_partial: true, ..OPTIONS };

fn place(folder: &TempDir) -> Place {
    Place::open(folder.path().as_os_str().as_bytes()).unwrap()
}

fn writer(folder: &TempDir) -> Writer {
    Writer::new(place(folder), OPTIONS)
}

fn file(path: &[u8], size: u64) -> Entry {
    Entry { size: Some(size), ..Entry::new(path, Kind::File, 0o644) }
}

fn link(path: &[u8], target: &[u8]) -> Entry {
    Entry { target: target.to_vec(), ..Entry::new(path, Kind::Link, 0o777) }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Copies into a writer.
struct Copy {
    writer: Writer,
    skipped: Vec<String>,
}

impl Sink for Copy {
    type Error = FileError;
    fn begin(&mut self, entry: Entry, _: Option<&mut fs::File>) -> Result<Begin, FileError> {
        if !entry.path.is_empty() {
            self.writer.entry(entry)?;
        }
        Ok(Begin::From(0))
    }
    fn data(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.writer.data(bytes)
    }
    fn end(&mut self) -> Result<(), FileError> {
        self.writer.end_file()
    }
    fn skipped(&mut self, path: &[u8], why: &str) -> Result<(), FileError> {
        self.skipped.push(format!("{}: {why}", shown(path)));
        Ok(())
    }
}

#[test]
fn a_tree_comes_out_as_it_went_in_with_odd_names_modes_times_and_links() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let root = from.path();
    let odd = ["$(touch x)", "new\nline", "sp ace", "-rf", "ünï", &"n".repeat(255)];
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    for name in odd {
        fs::write(root.join("a").join(name), name).unwrap();
    }
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"latin-\xe9")), "").unwrap();
    fs::write(root.join("a/b/large"), vec![7; (4 << 20) + 1]).unwrap();
    fs::set_permissions(root.join("a/-rf"), fs::Permissions::from_mode(0o4750)).unwrap();
    symlink("/etc/passwd", root.join("a/out")).unwrap();
    symlink("../b/large", root.join("a/b/in")).unwrap();
    nix::unistd::mkfifo(&root.join("pipe"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    for time in ["a/-rf", "a/b", "a"] {
        let then = nix::sys::time::TimeSpec::new(1_000_000_000, 123_000_000);
        let file = fs::File::open(root.join(time)).unwrap();
        nix::sys::stat::futimens(&file, &then, &then).unwrap();
    }
    fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o500)).unwrap();

    let mut copy = Copy { writer: writer(&to), skipped: Vec::new() };
    read(&place(&from), b".", b"", &mut copy).unwrap();
    assert_eq!(copy.skipped, ["pipe: it is a socket, a pipe or a device"]);
    let totals = copy.writer.finish().unwrap();
    assert_eq!((totals.files, totals.folders, totals.links), (8, 3, 2));
    let to = to.path();
    for name in odd {
        assert_eq!(fs::read_to_string(to.join("a").join(name)).unwrap(), name);
    }
    assert_eq!(fs::read(to.join("a/b/large")).unwrap().len(), (4 << 20) + 1);
    assert_eq!(fs::read_link(to.join("a/out")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(fs::read_link(to.join("a/b/in")).unwrap(), Path::new("../b/large"));
    for (path, mode) in [("a/-rf", 0o4750), ("a/b", 0o500)] {
        let there = fs::metadata(to.join(path)).unwrap();
        assert_eq!(
            (there.mode() & 0o7777, there.mtime(), there.mtime_nsec()),
            (mode, 1_000_000_000, 123_000_000)
        );
    }
    assert_eq!(fs::metadata(to.join("a")).unwrap().mtime(), 1_000_000_000, "renames came after its time");
    assert_eq!(names(to).len(), 2, "{:?}", names(to));
    fs::set_permissions(root.join("a/b"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(to.join("a/b"), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn names_that_lead_elsewhere_are_refused_each_with_its_reason() {
    let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::write(outside.path().join("precious"), "as it was").unwrap();
    let long = vec![b'x'; 4096];
    let long_part = [b"a/".to_vec(), vec![b'x'; 256]].concat();
    for bad in
        [&b"../x"[..], b"a/../../x", b"/etc/x", b"", b".", b"..", b"a//b", b"a/", b"a\0b", &long, &long_part]
    {
        let error = writer(&folder).entry(file(bad, 0)).unwrap_err();
        assert_eq!(error.problem, Problem::BadPath, "{bad:?}: {error}");
        assert!(error.to_string().len() < 400);
    }
    let absolute = outside.path().as_os_str().as_bytes();
    let depth = folder.path().components().count();
    let relative = ["../".repeat(depth).as_bytes(), &absolute[1..]].concat();
    for (name, target) in [(&b"one"[..], absolute), (b"two", &relative)] {
        let mut writer = writer(&folder);
        writer.entry(link(name, target)).unwrap();
        let through = [name, b"/precious"].concat();
        assert_eq!(writer.entry(file(&through, 0)).unwrap_err().problem, Problem::Escapes);
        // The link itself is replaced, and what it leads to is left alone.
        writer.entry(file(name, 2)).unwrap();
        writer.data(b"hi").unwrap();
        writer.end_file().unwrap();
        writer.finish().unwrap();
        assert_eq!(fs::read_to_string(folder.path().join(std::ffi::OsStr::from_bytes(name))).unwrap(), "hi");
    }
    assert_eq!(fs::read_to_string(outside.path().join("precious")).unwrap(), "as it was");
}

#[test]
fn a_file_appears_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("f"), "old").unwrap();
    let mut one = writer(&folder);
    one.entry(file(b"f", 6)).unwrap();
    one.data(b"new").unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("f")).unwrap(), "old");
    assert_eq!(one.end_file().unwrap_err().problem, Problem::Protocol);
    assert_eq!(one.data(b"more!").unwrap_err().problem, Problem::Protocol, "more than promised");
    drop(one);
    assert_eq!(names(folder.path()), ["f"]);
    assert_eq!(fs::read_to_string(folder.path().join("f")).unwrap(), "old");

    let mut empty = writer(&folder);
    empty.entry(file(b"f", 0)).unwrap();
    empty.end_file().unwrap();
    empty.entry(Entry::new(*b"g", Kind::File, 0o600)).unwrap();
    empty.data(b"of no size known before").unwrap();
    empty.end_file().unwrap();
    empty.finish().unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("f")).unwrap(), "");
    assert_eq!(fs::read_to_string(folder.path().join("g")).unwrap(), "of no size known before");
}

#[test]
fn a_broken_transfer_goes_on_only_with_the_same_beginning_and_one_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = |bytes: &[u8]| Sha256::digest(bytes).to_vec();
    let mut first = Writer::new(place(&folder), RESUMABLE);
    first.entry(file(b"f", 6)).unwrap();
    first.data(b"abcd").unwrap();
    let busy = Writer::new(place(&folder), RESUMABLE).entry(file(b"f", 6)).unwrap_err();
    assert_eq!(busy.problem, Problem::Busy);
    drop(first);
    assert_eq!(info(&place(&folder), b"f").unwrap().partial, Some(4));

    let wrong = Entry { offset: 4, prefix_sha256: prefix(b"abcX"), ..file(b"f", 6) };
    let longer = Entry { offset: 5, prefix_sha256: prefix(b"abcde"), ..file(b"f", 6) };
    for bad in [wrong, longer] {
        let error = Writer::new(place(&folder), RESUMABLE).entry(bad).unwrap_err();
        assert_eq!(error.problem, Problem::PrefixDiffers);
    }
    let mut second = Writer::new(place(&folder), RESUMABLE);
    second.entry(Entry { offset: 3, prefix_sha256: prefix(b"abc"), ..file(b"f", 6) }).unwrap();
    second.data(b"DEF").unwrap();
    second.end_file().unwrap();
    assert_eq!(second.finish().unwrap().bytes, 3);
    assert_eq!(fs::read_to_string(folder.path().join("f")).unwrap(), "abcDEF");
    assert_eq!(names(folder.path()), ["f"]);
}

#[test]
fn looks_and_changes_say_what_is_there_and_never_follow_a_link_away() {
    let folder = tempfile::tempdir().unwrap();
    let root = place(&folder);
    make_folder(&root, b"a/b/c", 0o750, true, None).unwrap();
    make_folder(&root, b"a/b/c", 0o750, true, None).unwrap();
    assert_eq!(make_folder(&root, b"a/b", 0o750, false, None).unwrap_err().problem, Problem::Exists);
    assert_eq!(make_folder(&root, b"x/y", 0o750, false, None).unwrap_err().problem, Problem::NotFound);
    fs::write(folder.path().join("a/f"), "12345").unwrap();
    symlink("b", folder.path().join("a/l")).unwrap();
    symlink("nowhere", folder.path().join("a/m")).unwrap();
    symlink("/", folder.path().join("a/out")).unwrap();
    let there = info(&root, b"a/l").unwrap();
    assert_eq!(
        (there.entry.kind, there.leads_to, there.entry.target.as_slice()),
        (Kind::Link, Some(Kind::Folder), &b"b"[..])
    );
    assert_eq!(info(&root, b"a/m").unwrap().leads_to, None);
    assert_eq!(info(&root, b"a/f").unwrap().entry.size, Some(5));
    assert_eq!(info(&root, b"a/nothing").unwrap_err().problem, Problem::NotFound);
    assert_eq!(info(&root, b"a/out/etc").unwrap_err().problem, Problem::Escapes);
    assert_eq!(info(&root, b"a\0f").unwrap_err().problem, Problem::BadPath);
    let (first, more) = list(&root, b"a", b"", 2).unwrap();
    let named: Vec<_> = first.iter().map(|info| info.entry.path.as_slice()).collect();
    assert_eq!((named, more), (vec![&b"b"[..], b"f"], true));
    let (rest, more) = list(&root, b"a", b"f", 9).unwrap();
    assert_eq!((rest.len(), more), (3, false));
    assert_eq!(list(&root, b"a/f", b"", 9).unwrap_err().problem, Problem::NotAFolder);

    assert_eq!(remove(&root, b"a/b", false).unwrap_err().problem, Problem::NotEmpty);
    assert_eq!(remove(&root, b"a/..", true).unwrap_err().problem, Problem::BadPath);
    remove(&root, b"a", true).unwrap();
    assert!(Path::new("/etc").exists() && names(folder.path()).is_empty());
    assert_eq!(remove(&root, b"a", true).unwrap_err().problem, Problem::NotFound);
}

#[test]
fn a_hundred_files_need_no_hundred_flushes_and_all_have_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = writer(&folder);
    for n in 0..200 {
        if n % 10 == 0 {
            writer.entry(Entry::new(format!("d{}", n / 10), Kind::Folder, 0o755)).unwrap();
        }
        writer.entry(file(format!("d{}/{n}", n / 10).as_bytes(), 1)).unwrap();
        writer.data(b"x").unwrap();
        writer.end_file().unwrap();
    }
    assert_eq!(writer.finish().unwrap().files, 200);
    for n in 0..200 {
        assert!(folder.path().join(format!("d{}/{n}", n / 10)).is_file());
    }
    assert_eq!(names(&folder.path().join("d3")).len(), 10);
}

/// The part that an upload of "f" with these bytes has left.
fn broken(folder: &TempDir, bytes: &[u8]) -> String {
    let before = names(folder.path());
    let mut writer = Writer::new(place(folder), RESUMABLE);
    writer.entry(file(b"f", 9)).unwrap();
    writer.data(bytes).unwrap();
    drop(writer);
    names(folder.path()).into_iter().find(|name| !before.contains(name)).unwrap()
}

#[test]
fn what_others_put_in_the_place_of_a_part_is_neither_written_to_nor_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (first, victim) = (broken(&folder, b"abcd"), at("victim"));
    fs::write(&victim, "abcd").unwrap();
    fs::set_permissions(&victim, fs::Permissions::from_mode(0o600)).unwrap();
    fs::remove_file(at(&first)).unwrap();
    // Whoever has seen the names of one upload knows how those of the next begin.
    let stem = &first[..first.len() - 32];
    symlink(&victim, at(&format!("{stem}link"))).unwrap();
    fs::hard_link(&victim, at(&format!("{stem}hard"))).unwrap();
    fs::create_dir(at(&format!("{stem}folder"))).unwrap();
    nix::unistd::mkfifo(&at(&format!("{stem}pipe")), nix::sys::stat::Mode::S_IRWXU).unwrap();
    // One that others may write to.
    fs::write(at(&format!("{stem}open")), "abcd").unwrap();
    fs::set_permissions(at(&format!("{stem}open")), fs::Permissions::from_mode(0o666)).unwrap();
    if nix::unistd::geteuid().is_root() {
        let foreign = at(&format!("{stem}foreign"));
        fs::write(&foreign, "abcd").unwrap();
        fs::set_permissions(&foreign, fs::Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(&foreign, Some(65534), Some(65534)).unwrap();
    }
    let put = names(folder.path());
    assert_eq!(info(&place(&folder), b"f").unwrap_err().problem, Problem::NotFound, "nothing to go on with");
    assert_eq!(digest_of_partial(&place(&folder), b"f", 4).unwrap(), None);
    let prefix_sha256 = Sha256::digest(b"abcd").to_vec();
    let on = Entry { offset: 4, prefix_sha256, ..file(b"f", 6) };
    let error = Writer::new(place(&folder), RESUMABLE).entry(on.clone()).unwrap_err();
    assert_eq!(error.problem, Problem::PrefixDiffers);

    let mut writer = Writer::new(place(&folder), RESUMABLE);
    writer.entry(file(b"f", 5)).unwrap();
    writer.data(b"whole").unwrap();
    writer.end_file().unwrap();
    writer.finish().unwrap();
    assert_eq!(fs::read_to_string(at("f")).unwrap(), "whole");
    assert_eq!(fs::read_to_string(&victim).unwrap(), "abcd");
    fs::remove_file(at("f")).unwrap();
    assert_eq!(names(folder.path()), put, "what is others' stays");

    // Beside all that, one of our own is found.
    broken(&folder, b"abcd");
    assert_eq!(info(&place(&folder), b"f").unwrap().partial, Some(4));
    assert_eq!(digest_of_partial(&place(&folder), b"f", 4).unwrap(), Some(on.prefix_sha256.clone()));
    let mut writer = Writer::new(place(&folder), RESUMABLE);
    writer.entry(on).unwrap();
    writer.data(b"EF").unwrap();
    writer.end_file().unwrap();
    writer.finish().unwrap();
    assert_eq!(fs::read_to_string(at("f")).unwrap(), "abcdEF");
}

#[test]
fn names_of_parts_can_not_be_guessed_and_a_new_upload_takes_the_place_of_all_that_was_left() {
    let folder = tempfile::tempdir().unwrap();
    let first = broken(&folder, b"abcd");
    fs::rename(folder.path().join(&first), folder.path().join("aside")).unwrap();
    let second = broken(&folder, b"abcd");
    assert_ne!(first, second);
    fs::rename(folder.path().join("aside"), folder.path().join(&first)).unwrap();
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().mode() & 0o777;
    assert_eq!((mode(&first), mode(&second)), (0o600, 0o600));
    let third = broken(&folder, b"xyz");
    assert_eq!(names(folder.path()), [third]);
}
