package inflate

import (
	"bytes"
	"compress/flate"
	"compress/zlib"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"

	"drover.io/drover/block/suite"
)

func samples(t testing.TB) map[string][]byte {
	m := map[string][]byte{"zeros": make([]byte, 65536)}
	rng := rand.New(rand.NewChaCha8([32]byte{1}))
	random := make([]byte, 65536)
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	m["random"] = random
	for _, period := range []int{1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 100, 257, 259, 5000} {
		b := make([]byte, 65536)
		for i := range b {
			b[i] = random[i%period]
		}
		m["period"+string(rune('a'+period%26))+string(rune('a'+period/26%26))] = b
	}
	skewed := make([]byte, 65536)
	for i := range skewed {
		// Lengths of codes up to the limit, so that there are subtables.
		v := 0
		for v < 200 && rng.Uint32()%3 != 0 {
			v++
		}
		skewed[i] = byte(v)
	}
	m["skewed"] = skewed
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	m["code"] = b[:1<<20]
	return m
}

func deflated(t testing.TB, b []byte, level int) []byte {
	var z bytes.Buffer
	w, err := flate.NewWriter(&z, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}

// TestInflate compares with the input of another implementation's encoder, at every level and block type.
func TestInflate(t *testing.T) {
	suite.Slow(t)
	var d Decoder
	for name, b := range samples(t) {
		for _, level := range []int{-2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9} {
			z := deflated(t, b, level)
			for _, n := range []int{len(b), len(b) / 2, 1, 300, 0} {
				dst := make([]byte, n)
				used, err := d.Fill(dst, z)
				if err != nil {
					t.Fatalf("%s level %d, %d bytes: %v", name, level, n, err)
				}
				if n == len(b) && used != len(z) {
					t.Fatalf("%s level %d: used %d of %d bytes", name, level, used, len(z))
				}
				if !bytes.Equal(dst, b[:n]) {
					t.Fatalf("%s level %d, %d bytes: output differs", name, level, n)
				}
			}
			if _, err := d.Fill(make([]byte, len(b)), z[:len(z)/2]); err == nil {
				t.Fatalf("%s level %d: half the input gave no error", name, level)
			}
			if _, err := d.Fill(make([]byte, len(b)+1), z); err == nil {
				t.Fatalf("%s level %d: more output than there is gave no error", name, level)
			}
		}
	}
}

// TestZlib: whole streams come out whole, and nothing else does.
func TestZlib(t *testing.T) {
	var d Decoder
	for name, b := range samples(t) {
		var z bytes.Buffer
		w := zlib.NewWriter(&z)
		_, _ = w.Write(b)
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		packed := z.Bytes()
		dst := make([]byte, len(b)+10)
		n, used, err := d.Zlib(dst, append(bytes.Clone(packed), "and more"...))
		if err != nil || used != len(packed) || !bytes.Equal(dst[:n], b) {
			t.Fatalf("%s: %d bytes from %d of %d: %v", name, n, used, len(packed), err)
		}
		damaged := bytes.Clone(packed)
		damaged[len(damaged)-1]++
		dictionary := bytes.Clone(packed)
		dictionary[1] |= 32
		for what, err := range map[string]error{
			"too small":  third(d.Zlib(dst[:len(b)-1], packed)),
			"cut":        third(d.Zlib(dst, packed[:len(packed)-1])),
			"half":       third(d.Zlib(dst, packed[:len(packed)/2])),
			"damaged":    third(d.Zlib(dst, damaged)),
			"dictionary": third(d.Zlib(dst, dictionary)),
			"no header":  third(d.Zlib(dst, packed[2:])),
		} {
			if err == nil {
				t.Errorf("%s, %s: no error", name, what)
			}
		}
	}
}

func third(_, _ int, err error) error { return err }

// FuzzInflate compares with another implementation, on input that is not always deflate data.
func FuzzInflate(f *testing.F) {
	for _, b := range samples(f) {
		b = b[:min(len(b), 4096)]
		for _, level := range []int{-2, 0, 1, 6, 9} {
			f.Add(deflated(f, b, level), uint16(len(b)))
		}
	}
	var d Decoder
	f.Fuzz(func(t *testing.T, src []byte, size uint16) {
		got := make([]byte, int(size)+64)
		tail := bytes.Repeat([]byte{0xA5}, 64)
		copy(got[size:], tail)
		_, err := d.Fill(got[:size:size], src)
		if !bytes.Equal(got[size:], tail) {
			t.Fatal("wrote outside of its output")
		}
		want := make([]byte, size)
		n, wantErr := io.ReadFull(flate.NewReader(bytes.NewReader(src)), want)
		// At the end of its input the other decoder asks for more bits than the last codes need, as zlib does not.
		if err == nil && errors.Is(wantErr, io.ErrUnexpectedEOF) {
			want, wantErr = want[:n], nil
		}
		// Nor does it mind a block that cannot end, which to zlib is none.
		if (err == nil) != (wantErr == nil) && !errors.Is(err, errEndless) {
			t.Fatalf("error %v, other decoder: %v", err, wantErr)
		}
		if err == nil && !bytes.Equal(got[:len(want)], want) {
			t.Fatal("output differs from the other decoder's")
		}
	})
}

func BenchmarkInflate(b *testing.B) {
	data := samples(b)["code"]
	var chunks [][]byte
	for off := 0; off+65536 <= len(data); off += 65536 {
		chunks = append(chunks, deflated(b, data[off:off+65536], 6))
	}
	dst := make([]byte, 65536)
	b.Run("own", func(b *testing.B) {
		var d Decoder
		b.SetBytes(65536)
		for i := range b.N {
			if _, err := d.Fill(dst, chunks[i%len(chunks)]); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("library", func(b *testing.B) {
		r := flate.NewReader(bytes.NewReader(nil))
		b.SetBytes(65536)
		for i := range b.N {
			if err := r.(flate.Resetter).Reset(bytes.NewReader(chunks[i%len(chunks)]), nil); err != nil {
				b.Fatal(err)
			}
			if _, err := io.ReadFull(r, dst); err != nil {
				b.Fatal(err)
			}
		}
	})
}
