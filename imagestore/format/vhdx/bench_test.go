package vhdx

import (
	"testing"

	"drover.io/drover/imagestore/format/oracle"
)

func BenchmarkConvert(b *testing.B) {
	raw := oracle.Disk(b, b.TempDir())
	for _, subformat := range []string{"dynamic", "fixed"} {
		b.Run(subformat, func(b *testing.B) { oracle.Convert(b, opener, raw, "vhdx", "-o", "subformat="+subformat) })
	}
}
