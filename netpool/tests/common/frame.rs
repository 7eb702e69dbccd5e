//! Ethernet frames, built and read by hand (RFC 826, 791, 768, 9293, 8200).

use std::net::{Ipv4Addr, Ipv6Addr};

use torpor_netpool::Mac;

fn ethernet(from: Mac, to: Mac, kind: u16, payload: &[u8]) -> Vec<u8> {
    [&to.0[..], &from.0, &kind.to_be_bytes(), payload].concat()
}

/// The internet checksum of all parts, each of even length but the last.
fn checksum(parts: &[&[u8]]) -> u16 {
    let pairs = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 =
        pairs.map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// An ARP packet: operation 1 asks, 2 answers.
pub fn arp(operation: u16, sender: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr), to: Mac) -> Vec<u8> {
    let head = [0, 1, 8, 0, 6, 4];
    let addresses = [&sender.0.0[..], &sender.1.octets(), &target.0.0, &target.1.octets()].concat();
    ethernet(sender.0, to, 0x0806, &[&head[..], &operation.to_be_bytes(), &addresses].concat())
}

/// Who asks for `address`, when the frame is such a question.
pub fn arp_question(frame: &[u8], address: Ipv4Addr) -> Option<(Mac, Ipv4Addr)> {
    let (operation, sender, target) = read_arp(frame)?;
    (operation == 1 && target == address).then_some(sender)
}

/// The MAC of `address`, when the frame is an answer with it.
pub fn arp_answer(frame: &[u8], address: Ipv4Addr) -> Option<Mac> {
    let (operation, sender, _) = read_arp(frame)?;
    (operation == 2 && sender.1 == address).then_some(sender.0)
}

fn read_arp(frame: &[u8]) -> Option<(u16, (Mac, Ipv4Addr), Ipv4Addr)> {
    if frame.get(12..14)? != [8, 6] {
        return None;
    }
    let ip = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(frame.get(at..at + 4)?).ok()?));
    let mac = Mac(frame.get(22..28)?.try_into().ok()?);
    Some((u16::from(*frame.get(21)?), (mac, ip(28)?), ip(38)?))
}

fn ipv4(from: (Mac, Ipv4Addr), to: (Mac, Ipv4Addr), protocol: u8, payload: &[u8]) -> Vec<u8> {
    let mut header = vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, protocol, 0, 0];
    header.extend(from.1.octets());
    header.extend(to.1.octets());
    header[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
    let sum = checksum(&[&header]);
    header[10..12].copy_from_slice(&sum.to_be_bytes());
    ethernet(from.0, to.0, 0x0800, &[&header[..], payload].concat())
}

fn udp(ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let length = 8 + payload.len() as u16;
    [&ports.0.to_be_bytes()[..], &ports.1.to_be_bytes(), &length.to_be_bytes(), &[0, 0], payload].concat()
}

/// A UDP datagram without checksum, which IPv4 allows.
pub fn udp4(from: (Mac, Ipv4Addr), to: (Mac, Ipv4Addr), ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    ipv4(from, to, 17, &udp(ports, payload))
}

/// A UDP datagram over IPv6.
pub fn udp6(from: (Mac, Ipv6Addr), to: (Mac, Ipv6Addr), ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let mut datagram = udp(ports, payload);
    let pseudo =
        [&from.1.octets()[..], &to.1.octets(), &(datagram.len() as u32).to_be_bytes(), &[0, 0, 0, 17]]
            .concat();
    let sum = checksum(&[&pseudo, &datagram]);
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    let mut header = vec![0x60, 0, 0, 0, 0, datagram.len() as u8, 17, 64];
    header.extend(from.1.octets());
    header.extend(to.1.octets());
    ethernet(from.0, to.0, 0x86dd, &[header, datagram].concat())
}

/// A TCP SYN with a maximum segment size option of 1460.
pub fn tcp_syn(from: (Mac, Ipv4Addr), to: (Mac, Ipv4Addr), ports: (u16, u16)) -> Vec<u8> {
    let mut segment =
        [&ports.0.to_be_bytes()[..], &ports.1.to_be_bytes(), &[0, 0, 0, 9, 0, 0, 0, 0]].concat();
    segment.extend([0x60, 0x02, 0xff, 0xff, 0, 0, 0, 0, 2, 4, 0x05, 0xb4]);
    let pseudo = [&from.1.octets()[..], &to.1.octets(), &[0, 6, 0, segment.len() as u8]].concat();
    let sum = checksum(&[&pseudo, &segment]);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    ipv4(from, to, 6, &segment)
}

/// The maximum segment size that a SYN-ACK offers (its first option, as Linux sends it).
pub fn syn_ack_mss(frame: &[u8]) -> Option<u16> {
    let tcp = frame.get(34..)?;
    let is_syn_ack = frame.get(12..14)? == [8, 0] && frame.get(23)? == &6 && tcp.get(13)? & 0x12 == 0x12;
    let option = tcp.get(20..24).filter(|option| is_syn_ack && option[..2] == [2, 4])?;
    Some(u16::from_be_bytes([option[2], option[3]]))
}

/// An ICMP echo request.
pub fn ping(from: (Mac, Ipv4Addr), to: (Mac, Ipv4Addr)) -> Vec<u8> {
    let mut message = vec![8, 0, 0, 0, 0, 7, 0, 1];
    let sum = checksum(&[&message]);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    ipv4(from, to, 1, &message)
}

/// Whether the frame is an ICMP echo reply from `address`.
pub fn is_pong(frame: &[u8], address: Ipv4Addr) -> Option<()> {
    let icmp = frame.get(12..14)? == [8, 0] && frame.get(23)? == &1 && frame.get(34)? == &0;
    (icmp && frame.get(26..30)? == address.octets()).then_some(())
}
