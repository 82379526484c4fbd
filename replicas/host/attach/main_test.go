package attach

import (
	"os"
	"testing"

	"drover.io/drover/driver/kubeapi/apitest"
)

func TestMain(m *testing.M) { os.Exit(apitest.Main(m)) }
