//! Columns of text.

use std::{fmt::Write as _, time::SystemTime};

use prost_types::Timestamp;

use super::clean;

/// Lays out rows under a head, each column as wide as its widest cell. Empty cells read "-".
pub fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned))
        .chain(
            rows.into_iter()
                .map(|row| row.map(|cell| if cell.is_empty() { "-".to_owned() } else { clean(&cell) })),
        )
        .collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut out = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

/// Lays out names and values, leaving out those without one.
pub fn fields<'a>(fields: impl IntoIterator<Item = (&'a str, String)>) -> String {
    let mut out = String::new();
    for (name, value) in fields {
        if !value.is_empty() {
            let _ = writeln!(out, "{:<14} {}", format!("{name}:"), clean(&value));
        }
    }
    out
}

/// How long ago a time was: "42s", "5m", "3h", "2d".
pub fn age(time: Option<&Timestamp>) -> String {
    let Some(time) = time.and_then(|t| SystemTime::try_from(*t).ok()) else { return String::new() };
    // A clock that was set back shows as no time at all.
    short(SystemTime::now().duration_since(time).unwrap_or_default().as_secs())
}

/// Seconds in their largest sensible unit.
pub fn short(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Bytes for people; nothing for 0.
pub fn bytes(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { torpor_sandbox::spec::size(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_empty_cells_show() {
        let rows = [["web".to_owned(), String::new()], ["a".to_owned(), "x\ny".to_owned()]];
        assert_eq!(table(["NAME", "IP"], rows), "NAME  IP\nweb   -\na     x y\n");
    }

    #[test]
    fn ages_use_one_unit() {
        assert_eq!([short(5), short(180), short(7200), short(864_000)], ["5s", "3m", "2h", "10d"]);
    }
}
