"""From rewards to a gradient: advantages on the host, the policy loss on device, the settings of both."""
