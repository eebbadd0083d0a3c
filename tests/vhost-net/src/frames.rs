//! Single frames through a device, with their headers: for tests of what is behind it.

use crate::client::Client;
use crate::frame::HEADER_LEN;
use crate::ring::RingError;

/// Header and frame.
pub type Packet = ([u8; HEADER_LEN as usize], Vec<u8>);

impl Client {
    /// Sends a frame of at most [`max_frame`](crate::Options::max_frame) bytes by a pair; false
    /// where its ring is full.
    ///
    /// # Errors
    /// The device broke the ring's protocol.
    pub fn send_frame(&mut self, pair: usize, (header, frame): &Packet) -> Result<bool, RingError> {
        let transmit = &mut self.pairs[pair].transmit;
        transmit.reclaim(&self.memory, usize::MAX)?;
        Ok(transmit.send_one(&self.memory, &self.layout, header, frame))
    }

    /// Frames that a pair has received, a burst at most. Those that make no sense are an error of
    /// the test.
    ///
    /// # Errors
    /// The device broke the ring's protocol.
    ///
    /// # Panics
    /// The device handed over what is no frame.
    pub fn take_frames(&mut self, pair: usize) -> Result<Vec<Packet>, RingError> {
        let mut packets = Vec::new();
        let receive = &mut self.pairs[pair].receive;
        let most = usize::MAX;
        receive.receive(&self.memory, &self.layout, most, |arrived, pieces| {
            if let Err(fault) = arrived {
                panic!("no frame: {fault:?}");
            }
            let mut frame = Vec::new();
            pieces.copy(&mut frame);
            packets.push((pieces.header(), frame));
        })?;
        Ok(packets)
    }
}
