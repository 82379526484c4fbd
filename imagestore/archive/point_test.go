package archive

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"testing"
)

// pointed unpacks b, and gives a point about every so many bytes, through their JSON.
func pointed(t testing.TB, r *Reader, every int64) (plain []byte, points []Point, err error) {
	t.Helper()
	defer r.Close()
	r.KeepPoints(every)
	var out bytes.Buffer
	buf := make([]byte, 10_000)
	for err == nil {
		var n int
		n, err = r.Read(buf)
		out.Write(buf[:n])
		p, ok := r.Point(int64(out.Len()))
		if !ok || len(points) > 0 && points[len(points)-1].Plain == p.Plain {
			continue
		}
		b, merr := json.Marshal(p)
		if merr != nil {
			t.Fatal(merr)
		}
		var again Point
		if err := json.Unmarshal(b, &again); err != nil {
			t.Fatal(err)
		}
		points = append(points, again)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return out.Bytes(), points, err
}

// window refuses to give more than it must.
type window struct {
	t     testing.TB
	plain []byte
	p     Point
}

func (w window) ReadAt(b []byte, off int64) (int, error) {
	if off < w.p.Plain-w.p.Window || off+int64(len(b)) > w.p.Plain {
		w.t.Errorf("bytes [%d, %d) are wanted, beyond the window of %d before %d", off, off+int64(len(b)), w.p.Window, w.p.Plain)
	}
	return copy(b, w.plain[off:]), nil
}

// rest is what is unpacked from a point on.
func rest(t testing.TB, packed, plain []byte, p Point, lim Limits) ([]byte, error) {
	t.Helper()
	r, err := Continue(bytes.NewReader(packed[p.Packed:]), p, lim, window{t, plain, p})
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return io.ReadAll(r)
}

// From any place the rest is the rest, and the checksums of the whole are compared.
func TestContinue(t *testing.T) {
	all := samples(t)
	// Of each kind as much as makes several places, but not more: the slowest tools pack it.
	big := bytes.Join([][]byte{all["code"][:1<<20], all["text"], all["random"][:1<<19], all["zeros"][:2<<20],
		all["disk"][:7<<19], all["skewed"]}, nil)
	for _, args := range [][]string{
		{"gzip", "-1c"}, {"gzip", "-9c"}, {"xz", "-0c"}, {"xz", "-6c", "-T1"}, {"xz", "-3c", "--check=sha256", "-T1"},
		{"xz", "-1c", "--check=none", "-T1"}, {"xz", "-c", "--lzma2=preset=1,lc=1,lp=3,pb=4", "--check=crc32", "-T1"},
		{"xz", "-0c", "-T2", "--block-size=1000000"}, {"xz", "-0c", "-T1", "--block-size=3000000"},
		{"zstd", "-1c"}, {"zstd", "-19c"}, {"zstd", "-c", "--no-check"}, {"zstd", "-c", "--zstd=wlog=17"},
		{"zstd", "-c", "--ultra", "-22", "--long=26"}, {"pzstd", "-c", "-1"},
	} {
		t.Run(fmt.Sprint(args), func(t *testing.T) {
			t.Parallel()
			once := run(t, big, args...)
			packed := append(once, run(t, all["text"], args...)...)
			plain := append(bytes.Clone(big), all["text"]...)
			f := Detect(packed)
			r, err := NewReader(bytes.NewReader(packed), f, Limits{})
			if err != nil {
				t.Fatal(err)
			}
			got, points, err := pointed(t, r, 100_000)
			if err != nil || !bytes.Equal(got, plain) {
				t.Fatalf("%d bytes of %d: %v", len(got), len(plain), err)
			}
			if len(points) < 5 {
				t.Fatalf("%d points in %d bytes", len(points), len(plain))
			}
			for i := 0; i < len(points); i += 1 + len(points)/8 {
				p := points[i]
				got, err := rest(t, packed, plain, p, Limits{})
				if err != nil || !bytes.Equal(got, plain[p.Plain:]) {
					t.Fatalf("from %d (%d): %d bytes of %d: %v", p.Plain, p.Packed, len(got), len(plain)-int(p.Plain), err)
				}
				// From there another process may be continued.
				r, err := Continue(bytes.NewReader(packed[p.Packed:]), p, Limits{}, window{t, plain, p})
				if err != nil {
					t.Fatal(err)
				}
				r.KeepPoints(300_000)
				if _, err := io.CopyN(io.Discard, r, (int64(len(plain))-p.Plain)/2); err != nil {
					t.Fatal(err)
				}
				q, ok := r.Point(int64(len(plain)))
				if err := r.Close(); err != nil {
					t.Fatal(err)
				}
				if ok {
					got, err = rest(t, packed, plain, q, Limits{})
					if err != nil || !bytes.Equal(got, plain[q.Plain:]) {
						t.Fatalf("from %d, after %d: %v", q.Plain, p.Plain, err)
					}
				}
			}
			// What was unpacked before counts: the checksum is over all of it.
			p := points[len(points)/2]
			if !p.summed(t) || p.Window == 0 {
				return
			}
			other := bytes.Clone(plain)
			for i := p.Plain - p.Window; i < p.Plain; i++ {
				other[i] ^= 0x55
			}
			if got, err := rest(t, packed, other, p, Limits{}); err == nil && !bytes.Equal(got, plain[p.Plain:]) {
				t.Error("another window made other bytes, and nobody noticed")
			}
		})
	}
}

// summed reports whether the point is in a part that has a checksum.
func (p Point) summed(t *testing.T) bool {
	t.Helper()
	var st placed
	if err := json.Unmarshal(p.State, &st); err != nil {
		t.Fatal(err)
	}
	return len(st.Sum) > 0
}

// A record that makes no sense is an error, whatever it claims.
func TestSenselessPoint(t *testing.T) {
	for _, f := range []Format{Gzip, Xz, Zstd} {
		for _, state := range []string{"", "{}", "[]", `{"know":{}}`, `{"know":{"have":-1,"bit":99}}`,
			`{"know":{"flags":[0,4],"block":{"dict":-1}}}`, `{"know":{"window":99999999999,"size":99999999999}}`,
			`{"know":{"window":1000,"size":1000,"tables":[{"have":true,"mode":3},{},{}]}}`} {
			p := Point{Format: f, Packed: 10, Plain: 1000, Window: 900, State: json.RawMessage(state)}
			if got, err := rest(t, make([]byte, 1000), make([]byte, 1000), p, Limits{}); err == nil {
				t.Errorf("%v %s: %d bytes", f, state, len(got))
			}
		}
	}
}
