package archive

import (
	"bufio"
	"io"
	"strings"

	"github.com/ulikunitz/xz"
)

// unxz decodes the blocks one after the other.
type unxz struct{ z *xz.Reader }

func newUnxz(r io.Reader) (decoder, error) {
	// The decoder reads byte by byte.
	z, err := xz.ReaderConfig{DictCap: minDict}.NewReader(bufio.NewReaderSize(newXzGuard(r), chunkSize))
	return &unxz{z}, err
}

func (u *unxz) Read(p []byte) (int, error) { return u.z.Read(p) }

func (u *unxz) Close() {}

// isXzChecksum reports whether the decoder found a wrong checksum: its errors have no types.
func isXzChecksum(err error) bool { return strings.HasPrefix(err.Error(), "xz: checksum error") }
