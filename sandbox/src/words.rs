//! What a guest or an engine says is shown to people and stands in answers and logs: it is cut and cleaned before it gets
//! anywhere.

/// The longest text that is taken from a guest, characters.
const LONGEST: usize = 300;

/// A text of the agent's, of bounded length and without anything that a terminal would act on.
pub fn said(text: &str) -> String {
    said_within(text, LONGEST)
}

/// The same of somebody's who may say more: at most `longest` characters.
pub fn said_within(text: &str, longest: usize) -> String {
    let clean = |letter: char| match letter {
        '\t' | '\n' | '\r' => ' ',
        // The last ranges turn the direction of writing.
        _ if letter.is_control() => '\u{fffd}',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '\u{fffd}',
        _ => letter,
    };
    text.chars().take(longest).map(clean).collect()
}

/// The name of a boot, which is a UUID; none when it is anything else.
pub fn boot_id(text: &str) -> Option<&str> {
    let fits = |(place, byte): (usize, u8)| match place {
        8 | 13 | 18 | 23 => byte == b'-',
        _ => byte.is_ascii_hexdigit(),
    };
    (text.len() == 36 && text.bytes().enumerate().all(fits)).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guests_text_is_cut_and_can_not_command_a_terminal() {
        assert_eq!(said("disk full\r\nsee dmesg"), "disk full  see dmesg");
        assert_eq!(said("\x1b[2Jgone\u{9b}\0\u{202e}x"), "\u{fffd}[2Jgone\u{fffd}\u{fffd}\u{fffd}x");
        assert_eq!(said(&"ä".repeat(1 << 20)).chars().count(), 300);
    }

    #[test]
    fn only_a_uuid_names_a_boot() {
        let good = "3f2b8c1e-0a4d-4b6e-9c7f-1234567890AB";
        assert_eq!(boot_id(good), Some(good));
        let others = [
            "",
            "3f2b8c1e-0a4d-4b6e-9c7f-1234567890a",
            "3f2b8c1e-0a4d-4b6e-9c7f-1234567890abc",
            "3f2b8c1e00a4d-4b6e-9c7f-1234567890ab",
            "3f2b8c1e-0a4d-4b6e-9c7f-1234567890a\n",
            "3f2b8c1e-0a4d-4b6e-9c7f-123456789\u{fffd}",
        ];
        assert!(others.iter().all(|text| boot_id(text).is_none()));
        assert_eq!(boot_id(&"a".repeat(1 << 20)), None);
    }
}
