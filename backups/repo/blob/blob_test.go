package blob_test

import (
	"bytes"
	"crypto/aes"
	"encoding/hex"
	"strings"
	"testing"

	"drover.io/drover/api"
	"drover.io/drover/backups/repo/blob"
)

// TestOpenReturnsTheSealedBytes: Open inverts Seal for every length around the block sizes, within the memory that the
// caller gave, and two sealings of the same bytes differ.
func TestOpenReturnsTheSealedBytes(t *testing.T) {
	key := blob.NewKey(blob.NewSecret())
	for _, n := range []int{0, 1, 15, 16, 17, 31, 32, 33, 4096, 100_003} {
		plain := bytes.Repeat([]byte{7, 1, 3}, n)[:n]
		memory := make([]byte, 5, 5+n+blob.Overhead)
		sealed := key.Seal(memory, plain)
		if len(sealed) != cap(memory) || &sealed[0] != &memory[0] {
			t.Fatalf("%d bytes: sealed outside of the given memory", n)
		}
		if other := key.Seal(nil, plain); bytes.Equal(other, sealed[5:]) {
			t.Errorf("%d bytes: two sealings are equal, so a nonce was used twice", n)
		}
		if got, err := key.Open(sealed[5:]); err != nil || !bytes.Equal(got, plain) {
			t.Errorf("%d bytes: opened %d bytes, %v", n, len(got), err)
		}
	}
}

// TestOpenRefusesEveryChangedBit: no bit of a sealed blob can change unnoticed, nor can another key open the blob.
func TestOpenRefusesEveryChangedBit(t *testing.T) {
	key := blob.NewKey(blob.NewSecret())
	sealed := key.Seal(nil, []byte("twenty bytes of text"))
	for bit := range 8 * len(sealed) {
		damaged := bytes.Clone(sealed)
		damaged[bit/8] ^= 1 << (bit % 8)
		if _, err := key.Open(damaged); !api.Is(err, api.Corrupt) {
			t.Fatalf("bit %d: %v, want an error of kind corrupt", bit, err)
		}
	}
	for n := range sealed {
		if _, err := key.Open(bytes.Clone(sealed[:n])); !api.Is(err, api.Corrupt) {
			t.Fatalf("cut to %d bytes: %v, want an error of kind corrupt", n, err)
		}
	}
	if _, err := blob.NewKey(blob.NewSecret()).Open(sealed); !api.Is(err, api.Corrupt) {
		t.Errorf("another key: %v, want an error of kind corrupt", err)
	}
}

// TestMACIsPoly1305AES: the MAC of a sealed empty blob, whose Poly1305 is the encrypted nonce alone, proves the order
// of K and r.
func TestMACIsPoly1305AES(t *testing.T) {
	secret := blob.NewSecret()
	sealed := blob.NewKey(secret).Seal(nil, nil)
	c, err := aes.NewCipher(secret.MACKey[:])
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 16)
	c.Encrypt(want, sealed[:16])
	if !bytes.Equal(sealed[16:], want) {
		t.Errorf("the MAC is %x, want %x", sealed[16:], want)
	}
}

// TestParseIsStrict: an id has one spelling.
func TestParseIsStrict(t *testing.T) {
	id := blob.Sum([]byte("x"))
	if got, err := blob.Parse(id.String()); err != nil || got != id {
		t.Errorf("parsed %v, %v", got, err)
	}
	for _, bad := range []string{"", "ab", strings.ToUpper(id.String()), id.String() + "0", id.String()[:63] + "g",
		" " + id.String()[:63], "../" + id.String()[3:], id.String()[:62] + "\xff0", hex.EncodeToString(id[:31])} {
		if _, err := blob.Parse(bad); !api.Is(err, api.Corrupt) {
			t.Errorf("%q: %v, want an error of kind corrupt", bad, err)
		}
	}
}

func BenchmarkSeal(b *testing.B) {
	key, plain := blob.NewKey(blob.NewSecret()), make([]byte, 2<<20)
	memory := make([]byte, 0, len(plain)+blob.Overhead)
	b.SetBytes(int64(len(plain)))
	for b.Loop() {
		key.Seal(memory, plain)
	}
}
