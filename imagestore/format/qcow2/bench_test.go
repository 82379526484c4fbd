package qcow2

import (
	"testing"

	"drover.io/drover/imagestore/format/oracle"
)

// BenchmarkConvert converts images of real files to raw images, in turn with qemu-img on two coroutines.
func BenchmarkConvert(b *testing.B) {
	raw := oracle.Disk(b, b.TempDir())
	for name, options := range map[string][]string{
		"zlib": {"-c", "-W"}, "zstd": {"-c", "-W", "-o", "compression_type=zstd"}, "plain": nil,
	} {
		b.Run(name, func(b *testing.B) { oracle.Convert(b, opener, raw, "qcow2", options...) })
	}
}
