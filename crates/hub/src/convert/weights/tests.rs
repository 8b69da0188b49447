use super::*;

#[test]
fn rotary_pairs_are_split_within_each_head() {
    let order = RowOrder::SplitPairs { head_dim: 6 };
    let sources: Vec<_> = (0..12).map(|row| order.source(row)).collect();
    assert_eq!(sources, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    assert_eq!(RowOrder::Stored.source(5), 5);
}

#[test]
fn codes_are_packed_with_the_first_element_in_the_lowest_bits() {
    // Element i of the block has code i mod 16 (Q4_0) or i - 16 (Q8_0).
    let nibbles = (0..16).map(|i: u8| i | (i << 4));
    let q4_0: Vec<u8> = [0, 0].into_iter().chain(nibbles).collect();
    let mut packed = Vec::new();
    codes(TensorType::Q4_0, &q4_0, &mut packed);
    let words: Vec<u32> = packed.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words, [0x7654_3210, 0xfedc_ba98, 0x7654_3210, 0xfedc_ba98]);

    let q8_0: Vec<u8> = [0, 0].into_iter().chain((0..32).map(|i: i8| (i - 16) as u8)).collect();
    let mut packed = Vec::new();
    codes(TensorType::Q8_0, &q8_0, &mut packed);
    assert_eq!(packed, (112..144).collect::<Vec<u8>>());
}

#[test]
fn only_floats_that_lose_nothing_fit_f16() {
    let data = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    assert!(fits_f16(&data(&[0.0, -1.5, 65504.0, 2f32.powi(-24)])));
    assert!(!fits_f16(&data(&[1.0, 1.0 + 2f32.powi(-11)])));
    assert!(!fits_f16(&data(&[70000.0])));
    assert!(!fits_f16(&data(&[2f32.powi(-25)])));
    assert!(!fits_f16(&data(&[f32::NAN])));
}
