package vmdk

import (
	"testing"

	"drover.io/drover/imagestore/format/oracle"
)

func BenchmarkConvert(b *testing.B) {
	raw := oracle.Disk(b, b.TempDir())
	for _, subformat := range []string{"monolithicSparse", "streamOptimized"} {
		b.Run(subformat, func(b *testing.B) { oracle.Convert(b, opener, raw, "vmdk", "-o", "subformat="+subformat) })
	}
}
